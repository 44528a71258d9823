"""Measure what a JSON schema costs per token: python bench/constraints.py [--quick] [--json FILE].

One bare engine with the demo model writes the same number of tokens free and under a schema, in turn, at batch 1 and
16, behind the same prompts; a second free run shows the machine's noise. Wall time is what a client waits; CPU time is
less disturbed by other load on the machine."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from baton.constraints.constraint import Constraint
from baton.engine.engine import Engine
from bench.lib.decoding import Decoded, decode, greedy
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support import bare_engine

BATCHES = (1, 16)
PROMPT, OUTPUT = 64, 128  # tokens
GOAL = 1.03  # times the time of a free token
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
# A schema whose answers do not end before max_tokens.
SCHEMA = Constraint("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 500}))


class Bench:
    """One engine, and prompts by the number of their round, the same for all arms."""

    def __init__(self, engine: Engine):
        self._engine, self._request_ids = engine, itertools.count()

    def arm(self, batch_size: int, constraint: Constraint | None) -> Callable[[], Decoded]:
        rounds = itertools.count()
        return lambda: self._decode(self._prompts(next(rounds), batch_size), constraint)

    def _prompts(self, round_number: int, batch_size: int) -> list[list[int]]:
        rng, vocab_size = random.Random(round_number), self._engine.spec.vocab_size
        return [[rng.randrange(5, vocab_size) for _ in range(PROMPT)] for _ in range(batch_size)]

    def _decode(self, prompts: list[list[int]], constraint: Constraint | None) -> Decoded:
        """Decode one batch whose answers all have OUTPUT tokens."""
        requests = greedy(self._request_ids, prompts, OUTPUT, None)
        decoded = decode(self._engine, [replace(request, constraint=constraint) for request in requests])
        assert all(len(answer) == OUTPUT for answer in decoded.answers)
        return decoded


def compare(report: Report, bench: Bench, batch_size: int, num_rounds: int) -> None:
    """Compare the times of a token in a step, wall and CPU."""
    kinds = {"free": None, "free again": None, "schema": SCHEMA}
    arms = {name: bench.arm(batch_size, constraint) for name, constraint in kinds.items()}
    interleave(arms, 1)  # warm
    runs = interleave(arms, num_rounds)
    for name, words in (("decode_s", "wall"), ("decode_cpu_s", "CPU")):
        found = medians({arm: [1e6 * getattr(run, name) / (OUTPUT - 1) for run in each] for arm, each in runs.items()})
        row = f"batch {batch_size}, {words} of a step"
        report.add(f"{row}, schema over free", found["schema"], "us", against=found["free"], goal=f"ratio <= {GOAL}")
        report.add(f"{row}, free over free (A/A)", found["free again"], "us", against=found["free"])


def compiling(report: Report, engine: Engine) -> None:
    """Measure the compilation of a schema, for which its first request waits."""
    vocabulary, taken = engine.grammars.vocabulary, []
    for _ in range(9):
        begun = time.perf_counter()
        vocabulary.compile(SCHEMA)
        taken.append(time.perf_counter() - begun)
    report.add("compile the schema", 1e3 * statistics.median(taken), "ms")


def main() -> int:
    arguments, report = start("constraints", "What a JSON schema costs a token, at batch 1 and 16.")
    engine = bare_engine.load_engine(MODEL, num_blocks=512, max_num_seqs=16, threads=1)
    bench = Bench(engine)
    for batch_size in BATCHES:
        compare(report, bench, batch_size, 5 if arguments.quick else 60)
    compiling(report, engine)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
