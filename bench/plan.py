"""What `baton plan` says against what the CPU stack does: python bench/plan.py [--quick] [--json FILE] [--only PART
...].

A grid of model shapes, forms, lengths and rates, split over two workers and whole on one. Every point is served for
real and in virtual time, by the same requests at the same times. Then six splits of one load: the one that the plan
takes against the best of those measured. Each run begins with the kernels of its models and forms, as bench/kernels.py
measures them: what memory gives to a virtual machine changes by the hour. Its loads take 6 minutes by themselves; with
--only one FILE collects its parts, and the means are of the points that it has.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

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
from baton.planning.efficiency import Efficiencies
from baton.planning.step_time import StepTimes
from baton.planning.virtual_stack import StackShape, VirtualStack
from baton.service.slo import Slo
from bench.kernels import MODEL, ROUNDS, measure
from bench.lib import sending
from bench.lib.random_model import write_random_model
from bench.lib.report import Report, finish, start
from bench.lib.tables.plan import PLANNED
from tests.support.stack import Stack

FORMS = ("none", "int8")
LOADS = {
    "shipped": ((1200, 32, 2.0), (512, 64, 4.0), (128, 64, 6.0)),
    "large": ((1200, 24, 1.0), (512, 32, 2.0), (128, 48, 3.0)),
}
NUM_REQUESTS, NUM_OF_SPLITS = 24, 120  # per point: the slowest takes half a minute
PARTS = (*(f"{name}-{form}" for name in LOADS for form in FORMS), "splits")  # names for --only
SPLITS = ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2))
SPLIT_LOAD = (512, 48, 16.0)  # more than one worker's capacity, and less than two workers'
_SEEDS = itertools.count(1)
SLO = Slo(ttft_s=0.5, tpot_s=0.03)


class Load(NamedTuple):
    """Requests of one length with Poisson arrivals."""

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
    """Medians of one run in seconds, and the requests per second that met the SLO."""

    ttft_s: float
    tpot_s: float
    goodput: float


class Planned:
    """The plan's predictions for stacks of one model folder."""

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
    """Serve the load through a running stack, with prompts that no other run has had."""
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


def grid(report: Report, folders: dict[str, Path], parts: Sequence[str], efficiencies: Efficiencies, at: Path) -> None:
    """Compare medians of TTFT and TPOT at every point of these parts."""
    for name, form in itertools.product(LOADS, FORMS):
        if f"{name}-{form}" not in parts:
            continue
        plan = Planned(folders[name], form, efficiencies)
        for split in ("always", "never"):
            options = ("--threads", "1", "--quantization", form, "--num-blocks", "2048")
            pair = (1, 1) if split == "always" else (0, 1)
            run = Stack(
                folders[name], at / f"{name}-{form}-{split}", num_prefill=pair[0], num_decode=pair[1], options=options,
                gateway_options=("--split", split),
            )  # fmt: skip
            num = 12 if report.quick else NUM_REQUESTS
            with run as stack, asyncio.Runner() as runner:
                loads = [Load(*each) for each in LOADS[name]]
                for load in loads:
                    real, predicted = measured(stack, load, num, runner), plan.serve(load, num, pair, split)
                    point = f"{name} {form}, {pair[0]}:{pair[1]}, {load.words}"
                    for what in ("TTFT", "TPOT"):
                        planned, found = (1e3 * getattr(each, f"{what.lower()}_s") for each in (predicted, real))
                        report.add(f"{point}: {what}{PLANNED}", planned, "ms", against=found)
                # The last point, a short one, is measured twice: no plan can predict the difference of the two.
                again = measured(stack, load, num, runner)
                report.add(f"{point}: A/A, TTFT", 1e3 * again.ttft_s, "ms", against=1e3 * real.ttft_s)
                report.add(f"{point}: A/A, TPOT", 1e3 * again.tpot_s, "ms", against=1e3 * real.tpot_s)


def means(report: Report) -> None:
    """Add the mean errors of all points in the report, including those of earlier runs."""
    goal = "" if report.quick else "value >= 24"
    for what, limit in (("TPOT", 10), ("TTFT", 20)):
        off = [100 * abs(row.ratio - 1) for row in report.all_rows if row.row.endswith(f": {what}{PLANNED}")]
        if off:
            report.add(f"grid: points of {what}", len(off), "points", goal=goal)
            report.add(f"grid: {what} planned wrong by (mean)", statistics.mean(off), "%", goal=f"value <= {limit}")


def splits(report: Report, efficiencies: Efficiencies, num: int, at: Path) -> None:
    """Measure the goodput of six splits of one load, and the share of the best that the plan's choice reaches."""
    plan, load = Planned(MODEL, "none", efficiencies), Load(*SPLIT_LOAD)
    real: dict[tuple[int, int], float] = {}
    predicted: dict[tuple[int, int], float] = {}
    for pair in SPLITS:
        split = "auto" if pair[0] else "never"
        run = Stack(
            MODEL, at / f"splits-{pair[0]}-{pair[1]}", num_prefill=pair[0], num_decode=pair[1],
            options=("--threads", "1", "--num-blocks", "2048"), gateway_options=("--split", split),
        )  # fmt: skip
        with run as stack, asyncio.Runner() as runner:
            real[pair] = measured(stack, load, num, runner).goodput
        predicted[pair] = plan.serve(load, num, pair, split).goodput
        report.add(
            f"{pair[0]}:{pair[1]}, {load.words}: goodput planned over measured",
            predicted[pair],
            "requests/s",
            against=real[pair],
        )
    # Of equal splits, the smaller stack.
    chosen = max(SPLITS, key=lambda pair: (round(predicted[pair], 2), -sum(pair)))
    name = f"goodput of the chosen {chosen[0]}:{chosen[1]} over the best of six"
    report.add(name, real[chosen], "requests/s", against=max(real.values()), goal="ratio >= 0.9")


def main() -> int:
    arguments, report = start("plan", "The plan against the CPU stack.", PARTS)
    parts = PARTS[:1] if arguments.quick else arguments.only
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        folders = {"shipped": MODEL, "large": write_random_model(at / "large")}
        forms = {shape: [form for form in FORMS if f"{shape}-{form}" in parts] for shape in folders}
        if "none" not in forms["shipped"]:
            forms["shipped"].append("none")  # it separates the host's costs from kernels, and plans the splits
        efficiencies = measure(
            [(folders[shape], each) for shape, each in forms.items()], at, 3 if report.quick else ROUNDS
        )
        grid(report, folders, parts, efficiencies, at)
        if "splits" in parts:
            splits(report, efficiencies, NUM_OF_SPLITS, at)
    means(report)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
