"""What `baton plan` says against what the CPU stack does: python bench/plan.py [--quick] [--efficiencies FILE] [--json FILE].

A grid of model shapes, forms, lengths and rates, split over two workers and whole on one. Every point is served for real
and in virtual time, by the same requests at the same times. Then six splits of one load: the one that the plan takes
against the best of those measured. Run bench/kernels.py on the same machine first, and give its file.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from baton.engine.core.config import EngineConfig, resolve
from baton.engine.models.registry import read_spec
from baton.loadgen.trace import TraceEntry
from baton.loadgen.workload import Job
from baton.planning.devices import this_cpu
from baton.planning.efficiency import Efficiencies, read_efficiencies, shipped
from baton.planning.step_time import StepTimes
from baton.planning.virtual_stack import StackShape, VirtualStack
from baton.service.slo import Slo
from bench.lib import sending
from bench.lib.large_model import write_large
from bench.lib.report import Report, finish, start
from tests.support.stack import Stack

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "demo" / "target"
FORMS = ("none", "int8")
LOADS = {
    "shipped": ((128, 64, 6.0), (512, 64, 4.0), (1200, 32, 2.0)),
    "large": ((128, 48, 1.5), (512, 32, 1.0), (1200, 24, 0.5)),
}
SPLITS = ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2))
SPLIT_LOAD = (512, 48, 8.0)
_SEEDS = itertools.count(1)
SLO = Slo(ttft_s=0.5, tpot_s=0.03)


class Load(NamedTuple):
    """Requests of one length that come at random."""

    num_prompt: int
    num_output: int
    rate: float

    def times(self, num: int) -> list[float]:
        rng, at_s = random.Random(0), 0.0
        found = []
        for _ in range(num):
            at_s += rng.expovariate(self.rate)
            found.append(at_s)
        return found

    @property
    def words(self) -> str:
        return f"{self.num_prompt} + {self.num_output} at {self.rate:g}/s"


class Served(NamedTuple):
    """Medians of one run, in seconds, and the requests a second that met the SLO."""

    ttft_s: float
    tpot_s: float
    goodput: float


class Planned:
    """What the plan says of stacks of one model folder."""

    def __init__(self, folder: Path, form: str, efficiencies: Efficiencies):
        spec = read_spec(folder)
        self._times = StepTimes(spec, this_cpu(1, efficiencies), efficiencies, form, "bf16")
        self.config = resolve(
            EngineConfig(model=folder, quantization=form, dtype="bf16", num_blocks=2048, threads=1), spec
        )

    def serve(self, load: Load, num: int, pair: tuple[int, int], split: str) -> Served:
        shape = StackShape(*pair, self.config, self.config, split)
        stack = VirtualStack(shape, dict.fromkeys(("prefill", "decode"), self._times))
        entries = [TraceEntry(at_s, load.num_prompt, load.num_output) for at_s in load.times(num)]
        found = stack.run(entries)
        return _served([(each.ttft_s, each.tpot_s or 0.0, each.e2e_s) for each in found], stack.now)


def measured(stack: Stack, load: Load, num: int, runner: asyncio.Runner) -> Served:
    """Serve the load through a running stack, by prompts that no other run has had."""
    rng = random.Random(next(_SEEDS))

    async def send(jobs: Sequence[Job]) -> list:
        sender = await sending.connect(stack.target)
        try:
            await sending.closed(sender, sending.draw_jobs(rng, [(64, 8)] * 2, 4096), 2)
            return await sending.arriving(sender, jobs)
        finally:
            await sender.close()

    jobs = sending.draw_jobs(rng, [(load.num_prompt, load.num_output)] * num, 4096)
    jobs = [replace(job, at_s=at_s) for job, at_s in zip(jobs, load.times(num), strict=True)]
    outcomes = runner.run(send(jobs))
    last = max(each.last_s for each in outcomes)
    return _served([(each.ttft_s, each.tpot_s, each.e2e_s) for each in outcomes], last)


def _served(latencies: Sequence[tuple[float, float, float]], seconds: float) -> Served:
    met = sum(SLO.met(*each) for each in latencies)
    return Served(
        statistics.median(each[0] for each in latencies),
        statistics.median(each[1] for each in latencies),
        met / seconds,
    )


def grid(report: Report, folders: dict[str, Path], efficiencies: Efficiencies, num: int, at: Path, quick: bool) -> None:
    """Compare medians of TTFT and TPOT at every point; the last two rows are the means of all errors. The last point of each stack is
    measured twice: what these differ by no plan can tell."""
    off: dict[str, list[float]] = {"TTFT": [], "TPOT": []}
    for name, folder in folders.items():
        for form in FORMS[:1] if quick else FORMS:
            plan = Planned(folder, form, efficiencies)
            for split in ("always", "never"):
                options = ("--threads", "1", "--quantization", form, "--num-blocks", "2048")
                pair = (1, 1) if split == "always" else (0, 1)
                run = Stack(
                    folder, at / f"{name}-{form}-{split}", num_prefill=pair[0], num_decode=pair[1], options=options,
                    gateway_options=("--split", split),
                )  # fmt: skip
                with run as stack, asyncio.Runner() as runner:
                    loads = [Load._make(each) for each in LOADS[name]]
                    for load in loads:
                        real, said = measured(stack, load, num, runner), plan.serve(load, num, pair, split)
                        point = f"{name} {form}, {pair[0]}:{pair[1]}, {load.words}"
                        for what, planned, found in (
                            ("TTFT", said.ttft_s, real.ttft_s),
                            ("TPOT", said.tpot_s, real.tpot_s),
                        ):
                            report.add(
                                f"{point}: {what}, planned over measured", 1e3 * planned, "ms", against=1e3 * found
                            )
                            off[what].append(100 * abs(planned - found) / found)
                    again = measured(stack, loads[-1], num, runner)
                    name_again = f"{name} {form}, {pair[0]}:{pair[1]}, {loads[-1].words}: A/A"
                    report.add(f"{name_again}, TTFT", 1e3 * again.ttft_s, "ms", against=1e3 * real.ttft_s)
                    report.add(f"{name_again}, TPOT", 1e3 * again.tpot_s, "ms", against=1e3 * real.tpot_s)
    for what, goal in (("TPOT", 10), ("TTFT", 20)):
        name = f"{len(off[what])} points: {what} planned wrong by (mean)"
        report.add(name, statistics.mean(off[what]), "%", goal=f"value <= {goal}")


def splits(report: Report, efficiencies: Efficiencies, num: int, at: Path) -> None:
    """Measure the goodput of six splits of one load, and what the one that the plan takes reaches of the best."""
    plan, load = Planned(MODEL, "none", efficiencies), Load(*SPLIT_LOAD)
    real: dict[tuple[int, int], float] = {}
    said: dict[tuple[int, int], float] = {}
    for pair in SPLITS:
        split = "auto" if pair[0] else "never"
        run = Stack(
            MODEL, at / f"splits-{pair[0]}-{pair[1]}", num_prefill=pair[0], num_decode=pair[1],
            options=("--threads", "1", "--num-blocks", "2048"), gateway_options=("--split", split),
        )  # fmt: skip
        with run as stack, asyncio.Runner() as runner:
            real[pair] = measured(stack, load, num, runner).goodput
        said[pair] = plan.serve(load, num, pair, split).goodput
        report.add(
            f"{pair[0]}:{pair[1]}, {load.words}: goodput planned over measured",
            said[pair],
            "requests/s",
            against=real[pair],
        )
    # Of equals the smaller stack.
    chosen = max(SPLITS, key=lambda pair: (round(said[pair], 2), -sum(pair)))
    name = f"goodput of the chosen {chosen[0]}:{chosen[1]} over the best of six"
    report.add(name, real[chosen], "requests/s", against=max(real.values()), goal="ratio >= 0.9")


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--efficiencies", type=Path)
    chosen, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    arguments, report = start("plan", "The plan against the CPU stack.")
    efficiencies = shipped("cpu") if chosen.efficiencies is None else read_efficiencies(chosen.efficiencies)
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        folders = {"shipped": MODEL}
        if not arguments.quick:
            folders["large"] = write_large(at / "large")
        grid(report, folders, efficiencies, 12 if arguments.quick else 60, at, arguments.quick)
        if not arguments.quick:
            splits(report, efficiencies, 120, at)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
