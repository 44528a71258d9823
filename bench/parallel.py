"""Compare two ranks, or two stages, of one thread with one process of two threads on this CPU: python bench/parallel.py
[--quick] [--json FILE].

The same bare engine, model and prompts, in turn; then a sum of both ranks alone, beside a turn in which nothing is said and
beside gloo.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import itertools
import mmap
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from baton.engine.engine import Engine
from baton.engine.parallel.collectives import Collectives, num_bytes_for
from baton.engine.parallel.shard import Shard
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support import bare

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "demo" / "target"
PROMPT, OUTPUT = 64, 48  # tokens of the decode rows
LONG_PROMPT = 512
HIDDEN = 4096  # of the rows that are summed: a model of 8B
NUM_SUMS = 200


class Arm:
    """One engine, and prompts that were never sent before."""

    def __init__(self, num_threads: int, **degree: int):
        self.engine: Engine = bare.load_engine(MODEL, threads=num_threads, num_blocks=512, **degree)
        self._num_threads = num_threads
        self._rng = random.Random(0)
        self._request_ids = map(str, itertools.count())

    def tokens_per_s(self, batch_size: int, num_prompt: int, num_output: int) -> float:
        """Prompt and output tokens over the time from submit to the last ending."""
        torch.set_num_threads(self._num_threads)
        vocab_size = self.engine.spec.vocab_size
        prompts = [[self._rng.randrange(5, vocab_size) for _ in range(num_prompt)] for _ in range(batch_size)]
        requests = [bare.make_request(next(self._request_ids), ids, max_tokens=num_output) for ids in prompts]
        begun = time.perf_counter()
        bare.run(self.engine, requests)
        return batch_size * (num_prompt + num_output) / (time.perf_counter() - begun)


def compare_engines(report: Report, num_rounds: int) -> None:
    """Goals of ranks that share layers: prompts at least 0.85 of one process, decode 0.8. Of stages one waits for the other
    in decode."""
    ranks, stages, alone = Arm(1, tensor_parallel=2), Arm(1, pipeline_parallel=2), Arm(2)
    try:
        for name, batch_size, num_prompt, num_output, goal in (
            (f"prompt of {LONG_PROMPT}", 1, LONG_PROMPT, 1, "ratio >= 0.85"),
            ("batch 1", 1, PROMPT, OUTPUT, "ratio >= 0.8"),
            ("batch 16", 16, PROMPT, OUTPUT, "ratio >= 0.8"),
        ):

            def arm(engine: Arm) -> Callable[[], float]:
                return lambda: engine.tokens_per_s(batch_size, num_prompt, num_output)

            arms = {"ranks": arm(ranks), "stages": arm(stages), "alone": arm(alone), "alone again": arm(alone)}
            interleave(arms, 1)  # warm
            found = medians(interleave(arms, num_rounds))
            report.add(f"{name}: two ranks over one", found["ranks"], "tokens/s", against=found["alone"], goal=goal)
            report.add(f"{name}: two stages over one", found["stages"], "tokens/s", against=found["alone"])
            report.add(f"{name}: A/A, one over one", found["alone again"], "tokens/s", against=found["alone"])
    finally:
        for engine in (ranks, stages):
            engine.engine.ranks.close()


def compare_sums(report: Report, num_rounds: int) -> None:
    """Of two threads: they meet as two processes do. A turn is a message of 4 bytes both ways through the same memory."""
    torch.set_num_threads(1)
    memory = memoryview(mmap.mmap(-1, num_bytes_for(2)))
    ends = [Collectives(memory, Shard(rank, 2)) for rank in range(2)]
    groups, word = _gloo(), torch.zeros(1)
    for num_tokens in (1, 16, 512):
        part = torch.randn(num_tokens, HIDDEN)
        rounded = part.bfloat16()
        arms = {
            "exact": lambda: _us(ends, lambda end: end.sum(part, torch.bfloat16)),
            "fast": lambda: _us(ends, lambda end: end.sum(rounded, torch.bfloat16)),
            "turn": lambda: _us(ends, lambda end: end.gather(word, wanted=False)),
            "gloo": lambda: _us(groups, lambda group: group.allreduce([rounded.clone()]).wait()),
        }
        interleave(arms, 1)
        found = medians(interleave(arms, num_rounds))
        name, goal = f"sum of {num_tokens} x {HIDDEN}", "ratio < 2" if num_tokens == 1 else ""
        report.add(f"{name} over a bare turn", found["exact"], "us", against=found["turn"], goal=goal)
        report.add(f"{name}, parts in bf16, over one in fp32", found["fast"], "us", against=found["exact"])
        report.add(f"{name} over gloo in bf16", found["exact"], "us", against=found["gloo"])


def _gloo() -> list:
    store, groups = distributed.HashStore(), [None, None]

    def join(rank: int) -> None:
        groups[rank] = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def _us(ends: list, act: Callable) -> float:
    return 1e6 * _seconds(ends, act) / NUM_SUMS


def _seconds(ends: list, act: Callable) -> float:
    def repeat(end) -> None:
        for _ in range(NUM_SUMS):
            act(end)

    other = threading.Thread(target=repeat, args=(ends[1],))
    begun = time.perf_counter()
    other.start()
    repeat(ends[0])
    other.join()
    return time.perf_counter() - begun


def main() -> int:
    arguments, report = start("parallel", "Two ranks of a model against one process with as many threads.")
    num_rounds = 3 if arguments.quick else 15
    compare_sums(report, num_rounds)
    compare_engines(report, num_rounds)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
