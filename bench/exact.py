"""Measure the cost of batch invariance on this CPU: python bench/exact.py [--quick] [--json FILE].

The same bare engine, model and attention, with the exact linear kernel and with the fast one, in turn.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import itertools
import random
import sys
import time
from collections.abc import Callable

from baton.engine.engine import Engine
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support import bare_engine

PROMPT, OUTPUT = 64, 48  # tokens of the decode rows
LONG_PROMPT = 1536  # of the prefill row: three chunks


class Arm:
    """One engine, and prompts that were never sent before."""

    def __init__(self, dtype: str, batch_invariant: bool):
        config = dict(dtype=dtype, batch_invariant=batch_invariant, num_blocks=512)
        self._engine: Engine = bare_engine.load_engine(MODEL, linear="auto" if batch_invariant else "fast", **config)
        self._rng = random.Random(0)
        self._request_ids = map(str, itertools.count())

    def tokens_per_s(self, batch_size: int, num_prompt: int, num_output: int) -> float:
        """Return prompt and output tokens over the time from submit to the last end."""
        vocab_size = self._engine.spec.vocab_size
        prompts = [[self._rng.randrange(5, vocab_size) for _ in range(num_prompt)] for _ in range(batch_size)]
        requests = [bare_engine.bare_request(next(self._request_ids), ids, max_tokens=num_output) for ids in prompts]
        begun = time.perf_counter()
        bare_engine.serve_alone(self._engine, requests)
        return batch_size * (num_prompt + num_output) / (time.perf_counter() - begun)


def compare(report: Report, dtype: str, num_rounds: int) -> None:
    exact, fast = Arm(dtype, batch_invariant=True), Arm(dtype, batch_invariant=False)
    for name, batch_size, num_prompt, num_output in (
        ("batch 1", 1, PROMPT, OUTPUT),
        ("batch 16", 16, PROMPT, OUTPUT),
        (f"prompt of {LONG_PROMPT}", 1, LONG_PROMPT, 1),
    ):

        def arm(engine: Arm) -> Callable[[], float]:
            return lambda: engine.tokens_per_s(batch_size, num_prompt, num_output)

        arms = {"exact": arm(exact), "fast": arm(fast), "fast again": arm(fast)}
        interleave(arms, 1)  # warm
        found = medians(interleave(arms, num_rounds))
        report.add(f"{dtype}, {name}: exact over fast", found["exact"], "tokens/s", against=found["fast"])
        report.add(f"{dtype}, {name}: A/A, fast over fast", found["fast again"], "tokens/s", against=found["fast"])


def main() -> int:
    arguments, report = start("exact", "What batch invariance costs, engine against engine.")
    for dtype in ("bf16", "fp32"):
        compare(report, dtype, 3 if arguments.quick else 15)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
