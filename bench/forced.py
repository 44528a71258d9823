"""Measure the cost of speculation at given acceptance: python bench/forced.py [--quick] [--json FILE].

The proposer knows the answers and proposes each token correctly with a given probability, at no cost; so verification
is measured, by acceptance, width and batch. It runs Llama-3.1-8B's shape with random weights on a CUDA device, else the
demo model on the CPU. `against` is plain decoding of the same prompts, `limit` what speculation would reach if a
verifying step took no longer than a plain one."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import itertools
import sys
from collections.abc import Sequence

import torch

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from bench.lib.decoding import decode, greedy
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, start
from tests.support.engine.forced import ForcedProposer

ACCEPTANCES = (0.0, 0.5, 0.7, 0.85, 1.0)
WIDTHS, QUICK_WIDTHS = range(2, 9), (2, 4, 8)
BATCHES = (1, 8, 64)
PROMPT, OUTPUT = 128, 96  # tokens


def load(proposer: ForcedProposer) -> Engine:
    if not torch.cuda.is_available():
        config = EngineConfig(MODEL, speculator="auto", num_blocks=1024, max_num_batched_tokens=2048)
        return Engine.load(config, proposers=[proposer])
    from bench.arms import gpu_arms

    device = torch.device("cuda")
    return gpu_arms.Ours("bf16", device, max_num_seqs=max(BATCHES), context=1024, proposers=[proposer]).engine


class Runs:
    """Batches of one engine. Answers are greedy, so plain decoding tells what to propose."""

    def __init__(self):
        self.proposer = ForcedProposer({}, 0.0, 0)
        self.engine = load(self.proposer)
        self.proposer.vocab_size = self.engine.spec.vocab_size
        self._generator, self._names = torch.Generator().manual_seed(0), itertools.count()

    def prompts(self, count: int) -> list[list[int]]:
        ids = torch.randint(5, self.engine.spec.vocab_size, (count, PROMPT), generator=self._generator)
        return ids.tolist()

    def run(self, prompts: Sequence[Sequence[int]], width: int, answers: list[list[int]] | None = None):
        """Run a batch; return (tokens/s after all prompts were read, answers)."""
        requests = greedy(self._names, prompts, OUTPUT, width)
        if answers is not None:
            names = [(request.key.request_id, 0) for request in requests]
            self.proposer.answers = dict(zip(names, answers, strict=True))
        decoded = decode(self.engine, requests)
        return decoded.tokens_per_s, decoded.answers


def compare(report: Report, runs: Runs, batch_size: int, widths: Sequence[int]) -> None:
    prompts = runs.prompts(batch_size)
    _, answers = runs.run(prompts, 0)  # warm
    for width, probability in itertools.product(widths, ACCEPTANCES):
        runs.proposer.probability = probability
        plain, _ = runs.run(prompts, 0)
        speed, found = runs.run(prompts, width, answers)
        again, _ = runs.run(prompts, 0)
        assert found == answers or torch.cuda.is_available(), "speculated answers differ"
        row = f"batch {batch_size}, width {width}, accepted {probability:g}: over plain"
        ideal = sum(probability**place for place in range(width + 1))
        base = (plain + again) / 2
        report.add(row, speed, "tokens/s", against=base, limit=base * ideal)
    report.add(f"batch {batch_size}: A/A, plain over plain", again, "tokens/s", against=plain)


def main() -> int:
    arguments, report = start("forced", "Speculation at a given acceptance, by width and batch.")
    runs = Runs()
    for batch_size in BATCHES:
        compare(report, runs, batch_size, QUICK_WIDTHS if arguments.quick else WIDTHS)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
