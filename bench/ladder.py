"""From a naive server to all techniques: python bench/ladder.py [--quick] [--json FILE].

Each technique is measured alone on the naive server, and added to those before it, with the same pool of KV bytes and
the same requests: a synthetic chat trace over held-out text at an eighth of its lengths, which fits the demo model's
context. Throughput is that of requests that are all there at the start; latencies and goodput are those of the trace's
own arrivals, sped up to a share of the naive server's capacity. bench/pages.py makes the table of the result."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it when it is loaded


from baton.cli.models.eval import encode, read_texts
from baton.loadgen import workload
from baton.loadgen.outcome import Outcome
from baton.loadgen.summary import percentiles
from baton.loadgen.trace import read_trace
from baton.service.slo import parse_slo
from bench.arms.naive_server import Ran, Rung, Technique
from bench.lib import sending
from bench.lib.paths import MODEL, ROOT
from bench.lib.report import Report, finish, start
from tests.support.stack import Stack

TRACE = ROOT / "bench" / "traces" / "conversation.jsonl"
QUALITY = ROOT / "bench" / "results" / "quality-cpu-2026-11-20.json"
LENGTH_SCALE = 1 / 8  # the longest prompt of the trace is then 2,005 tokens
CONTEXT, BLOCK = 2048, 16
NUM_BLOCKS = 8 * CONTEXT // BLOCK  # of bf16 KV: eight of the longest answers
NUM_BLOCKS_INT8 = NUM_BLOCKS * 3584 // 1848  # with as many bytes (per token: bench/quality.py)
PLACES = 32
CHUNK = 512
NUM_WARM = 4
RATE_SHARE = 0.8  # of the naive server's capacity: all rungs get the same arrivals
SLO = parse_slo("ttft=300ms,tpot=25ms")
CORES = len(os.sched_getaffinity(0))

NAIVE = dict(
    dtype="bf16",
    attention="reference",
    linear="dense",
    block_size=BLOCK,
    num_blocks=NUM_BLOCKS,
    max_num_seqs=PLACES,
    max_num_batched_tokens=CONTEXT + PLACES,  # every prompt in one step
)
INT8_KV = dict(kv_dtype="int8", num_blocks=NUM_BLOCKS_INT8)
TECHNIQUES = (
    Technique("continuous batching", rules=dict(continuous=True)),
    Technique("paged KV", rules=dict(paged=True)),
    Technique("prefix cache", rules=dict(named=True)),
    Technique("chunked prefill", dict(max_num_batched_tokens=CHUNK)),
    Technique("attention backend", dict(attention="auto")),
    Technique("linear kernels", dict(linear="auto")),
    Technique("int8 weights", dict(linear="auto", quantization="int8")),
    Technique("int8 KV", INT8_KV),
    Technique("speculation (ngram)", dict(speculator="ngram")),
)
INT4 = Technique("int4-g32 weights", dict(linear="auto", quantization="int4-g32"))
WORKER_OPTIONS = (
    "--quantization", "int8", "--kv-dtype", "int8", "--block-size", str(BLOCK), "--num-blocks", str(NUM_BLOCKS_INT8),
    "--max-num-seqs", str(PLACES), "--max-num-batched-tokens", str(CHUNK), "--speculator", "ngram",
)  # fmt: skip
# Rows of the recorded run of bench/quality.py with the quality of a form of weights or KV.
QUALITY_ROWS = {"bf16": "bf16", "int8": "int8", "int4-g32": "--quantization int4-g32", "int8 kv": "kv int8"}
GOALS = {"ttft": "ratio <= 0.4", "throughput": "ratio >= 3", "kv": "value >= 0.9"}


class Trace:
    """The jobs of every run: the same lengths, sharing and arrivals, each time over another text."""

    def __init__(self, num_jobs: int):
        entries = read_trace(TRACE)[100 : 100 + num_jobs]
        scaled = workload.from_trace(entries, 1.0, LENGTH_SCALE, None)
        self._jobs, _ = workload.fitted(scaled, CONTEXT)
        self._ids = [token_id for ids in encode(MODEL, read_texts(None)) for token_id in ids]

    def jobs(self, text: int, requests_per_s: float | None) -> list[workload.Job]:
        """Return the jobs; with `requests_per_s` None all arrive at the start."""
        first_s, last_s = self._jobs[0].at_s, self._jobs[-1].at_s
        pace = len(self._jobs) / requests_per_s / (last_s - first_s) if requests_per_s else 0.0
        return [
            sending.job_of(self._prompt(text, job), job.num_output, job.index, pace * (job.at_s - first_s))
            for job in self._jobs
        ]

    def _prompt(self, text: int, job: workload.Job) -> tuple[int, ...]:
        """Return a prompt in which blocks of equal hash ids are equal passages."""
        ids: list[int] = []
        for hash_id in job.hash_ids:
            ids += self._passage(f"{text} {hash_id}", job.block)
        ids += self._passage(f"{text} own {job.index}", max(0, job.num_prompt - len(ids)))
        return tuple(ids[: job.num_prompt])

    def _passage(self, name: str, num: int) -> list[int]:
        begin = random.Random(name).randrange(len(self._ids) - num)
        return self._ids[begin : begin + num]


class Ladder:
    """Rows of rungs, each against the naive server's."""

    def __init__(self, report: Report, trace: Trace):
        self._report, self._trace = report, trace
        self._quality = {row["row"]: row["value"] for row in json.loads(QUALITY.read_text())["rows"]}
        self._naive: dict[str, float] = {}
        self._answers: list[list[int]] = []
        self._rate = 0.0

    def rung(self, name: str, techniques: Sequence[Technique], goals: bool = False) -> None:
        """Measure one rung. The first is the naive server, the baseline, which sets the rate of arrivals."""
        rung = Rung(MODEL, NAIVE, techniques)
        kv = "int8 kv" if rung.engine.config.kv_dtype == "int8" else "bf16"
        weights = rung.engine.config.quantization
        self.measure(name, rung.run, ("bf16" if weights == "auto" else weights, kv), goals)

    def measure(
        self, name: str, run: Callable[[Sequence[workload.Job]], Ran], forms: tuple[str, str], goals: bool = False
    ) -> None:
        """Run a rung and add its rows. `forms`: QUALITY_ROWS of its weights and KV; `goals`: whether the goals of all
        techniques together apply."""
        run(self._trace.jobs(0, None)[:NUM_WARM])
        full = run(self._trace.jobs(1, None))
        if not self._rate:
            self._rate = RATE_SHARE * full.requests_per_s
            self._report.add("arrivals over naive throughput", self._rate, "requests/s", against=full.requests_per_s)
        paced = run(self._trace.jobs(2, self._rate))
        self._add_times(name, paced.outcomes, goals)
        self._row(name, "throughput", full.requests_per_s, "requests/s", GOALS["throughput"] if goals else "")
        if full.kv_use is not None:
            self._row(name, "KV used over held", full.kv_use, "share", GOALS["kv"] if goals else "")
        self._add_quality(name, [each.token_ids for each in full.outcomes + paced.outcomes], forms)

    def _add_times(self, name: str, outcomes: Sequence[Outcome], goals: bool) -> None:
        values = {
            "TTFT": percentiles([each.ttft_s for each in outcomes]),
            "TPOT": percentiles([each.tpot_s for each in outcomes if each.tpot_s is not None]),
        }
        for what, point in itertools.product(values, ("p50", "max")):  # of a few dozen, a p99 would be the maximum too
            goal = GOALS["ttft"] if goals and (what, point) == ("TTFT", "p50") else ""
            self._row(name, f"{what} {point}", 1e3 * values[what][point], "ms", goal)
        num_good = sum(SLO.met(each.ttft_s, each.tpot_s, each.e2e_s) for each in outcomes)
        self._row(name, f"goodput within {SLO}", num_good / len(outcomes) * self._rate, "requests/s")
        num_cached = sum(each.num_cached for each in outcomes)
        self._row(
            name, "prompt tokens found in the cache", num_cached / sum(each.num_prompt for each in outcomes), "share"
        )

    def _add_quality(self, name: str, answers: list[list[int]], forms: tuple[str, str]) -> None:
        """Add the tokens before the first difference from the naive server's answer, and the bits per byte that
        bench/quality.py has recorded for the form of weights or KV that loses more."""
        self._answers = self._answers or answers
        num_same = sum(_num_common(*pair) for pair in zip(answers, self._answers, strict=True))
        self._report.add(f"{name}: tokens as the naive server's", num_same / sum(map(len, answers)), "share")
        recorded = max(self._quality[f"{QUALITY_ROWS[form]}: bits per byte"] for form in forms)
        self._row(name, "bits per byte, recorded", recorded, "bits/byte")

    def _row(self, name: str, what: str, value: float, unit: str, goal: str = "") -> None:
        naive = self._naive.setdefault(what, value)
        self._report.add(f"{name}: {what}", value, unit, against=naive, goal=goal)


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


def served(ladder: Ladder, runner: asyncio.Runner, folder: Path) -> None:
    """Measure all techniques through a gateway, as its client sees them: with one worker on all cores, then with two
    that share them. `--split always` also splits what the router would leave whole."""
    for name, split, num_prefill, num_threads in (
        ("all on, served by one worker", "never", 0, CORES),
        ("all on, split over two workers", "always", 1, max(1, CORES // 2)),
    ):
        options = [*WORKER_OPTIONS, "--threads", str(num_threads)]
        gateway_options = ["--split", split, "--max-queue-wait-s", "60"]
        with Stack(
            MODEL, folder / split, num_prefill=num_prefill, options=options, gateway_options=gateway_options
        ) as stack:
            ladder.measure(name, lambda jobs: runner.run(_through(stack.target, jobs)), ("int8", "int8 kv"))


async def _through(target: str, jobs: Sequence[workload.Job]) -> Ran:
    sender = await sending.connect(target)
    try:
        return Ran(await sending.arriving(sender, jobs), None)
    finally:
        await sender.close()


def main() -> int:
    arguments, report = start("ladder", "From a naive server to all techniques on, each alone and added up.")
    ladder = Ladder(report, Trace(16 if arguments.quick else 32))
    ladder.rung("naive", ())
    if not arguments.quick:
        for technique in (*TECHNIQUES, INT4):
            ladder.rung(f"{technique.name} alone", [technique])
        for num in range(2, len(TECHNIQUES)):
            ladder.rung(f"+ {TECHNIQUES[num - 1].name}", TECHNIQUES[:num])
    ladder.rung("all on", TECHNIQUES, goals=True)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        served(ladder, runner, Path(folder))
    ladder.rung("naive again", ())
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
