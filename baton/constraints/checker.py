"""A process that compiles constraints to find out whether that succeeds and what it costs, so that a constraint that
explodes harms no gateway.

Input: a frame with the size of the vocabulary and the tokenizer.json, then a frame for each constraint. Output: a frame
for each frame of the input, with ["", ""] or with the problem as [path, reason]. A frame is a length in 8 bytes,
followed by as many bytes. The process ends when its input ends; the kernel kills it when a constraint takes more
processor time or memory than is allowed.
"""

import json
import os
import resource
import signal
import sys
import time

import numpy as np

from baton import system
from baton.constraints.constraint import BadConstraint, Constraint
from baton.constraints.frames import MAX_CPU_S, write_frame
from baton.constraints.grammar import Grammar, Vocabulary

MAX_GROWTH = 512 << 20  # bytes, in addition to the memory of the tokenizer
MAX_MASK_S = 0.1  # for one token: all answers of a step wait for its mask
_STEPS = 48  # tokens of a walk through the grammar, which measures the time of its masks
_NICE = 10  # running requests go first


def main() -> int:
    """Check the constraints on standard input until it ends, and return the exit code."""
    os.nice(_NICE)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    first = _read_frame()
    if first is None:
        return 0
    try:
        vocabulary = Vocabulary(first[8:], int.from_bytes(first[:8], "little"))
    except ValueError as error:
        _answer("", str(error))
        return 1
    size = system.memory_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_GROWTH, size + MAX_GROWTH))
    _answer("", "")
    while (frame := _read_frame()) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        try:
            walk(vocabulary.compile(Constraint(*json.loads(frame))))
            problem = "", ""
        except BadConstraint as error:
            problem = error.path, error.reason
        except MemoryError:
            problem = "", "takes too much memory"
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(*problem)
    return 0


def walk(grammar: Grammar) -> None:
    """Follow the grammar along random tokens, always the same ones, and start again when they end, since `{}` says
    nothing about other objects. Raises BadConstraint if the grammar cannot be followed, or if a mask takes too long."""
    vocabulary, cursor, token_ids = grammar.vocabulary, grammar.cursor(), list[int]()
    mask, draws = vocabulary.new_masks(1)[0], np.random.default_rng(0)
    for _ in range(_STEPS):
        begun_at = time.process_time()
        if not cursor.fill(mask):
            raise BadConstraint("", cursor.problem)
        if time.process_time() - begun_at > MAX_MASK_S:
            raise BadConstraint("", f"takes more than {MAX_MASK_S} s of processor time for one token")
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            cursor, token_ids = grammar.cursor(), []
            continue
        token_ids.append(int(draws.choice(allowed)))
        cursor.read(token_ids)


def _read_frame() -> bytes | None:
    stream = sys.stdin.buffer
    head = stream.read(8)
    if len(head) < 8:
        return None
    return stream.read(int.from_bytes(head, "little"))


def _answer(path: str, reason: str) -> None:
    write_frame(sys.stdout.buffer, json.dumps([path, reason]).encode())


if __name__ == "__main__":
    sys.exit(main())
