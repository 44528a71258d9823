"""The whole stack against one bare engine: python bench/stack.py [--quick] [--json FILE].

Stacks run as separate processes, as `baton up` starts them, and "together": gateway and one worker as one process.

Every comparison is made within one run, with its arms in turn; the A/A row shows how much two runs of the same thing
differ. The load generator runs on the same cores and counts against the stack. Rows "CPU a token" give the CPU
microseconds that each part of the stack spends per token of an answer, prompt included, compared with the bare
engine's; waiting for a core, as on a busy machine, is not included."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

# Threads that spin while they wait would take the cores from other processes. torch reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from baton import system
from baton.engine.core.request import RequestEnded
from baton.engine.engine import Engine
from baton.engine.loop import ENGINE_THREAD
from baton.loadgen.workload import Job
from bench.lib import sending
from bench.lib.limits import Limits, measure
from bench.lib.paths import MODEL, ROOT
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support import bare_engine
from tests.support.process import Process
from tests.support.stack import Stack, TogetherStack

CORES = len(os.sched_getaffinity(0))
AS_UP: dict[str, str | None] = {"OMP_NUM_THREADS": None}  # workers divide the cores themselves
PROMPT, OUTPUT = 256, 64  # tokens of the throughput rows: long enough for the prefill worker to read
HIT_PROMPT = 2000


class CpuShares:
    """CPU seconds of each part of a stack, client included, which other processes hardly affect. Without a stack, those
    of this process."""

    def __init__(self, stack: Stack | None = None):
        self.seconds = Counter[str]()
        self._stack = stack

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = self._now()
        yield
        self.seconds += self._now() - before

    def _now(self) -> Counter[str]:
        found = Counter(client=time.process_time())
        for process in self._stack.processes if self._stack else ():
            for thread, seconds in system.thread_times(process.pid).items():
                found[self._part(process.name.rstrip("0123456789"), thread == ENGINE_THREAD)] += seconds
        return found

    def _part(self, name: str, is_engine: bool) -> str:
        if isinstance(self._stack, TogetherStack):
            return "engine" if is_engine else "gateway and sessions"
        return name if name == "gateway" else f"{name} worker's {'engine' if is_engine else 'sessions'}"


class Bench:
    """Two running stacks and one bare engine with the same options, asked in turn."""

    def __init__(self, report: Report, limits: Limits, runner: asyncio.Runner, stacks: Sequence[Stack], engine: Engine):
        """Prepare the arms. `stacks`: separate processes, and together."""
        self.report, self.limits, self.engine = report, limits, engine
        self.stack, self.together = stacks
        self._run = runner.run
        self._rng = random.Random(0)
        self._request_ids = map(str, itertools.count())
        self._sender, self._together_sender = (self._run(sending.connect(stack.target)) for stack in stacks)

    def close(self) -> None:
        for sender in (self._sender, self._together_sender):
            self._run(sender.close())

    def jobs(self, lengths: Sequence[tuple[int, int]]) -> list[Job]:
        return sending.draw_jobs(self._rng, lengths, self.engine.spec.vocab_size)

    # ---- stack over engine ----

    def throughput(self, concurrency: int, num_jobs: int, num_rounds: int) -> None:
        """Measure output tokens/s in a closed loop."""
        lengths = [(PROMPT, OUTPUT)] * num_jobs
        torch.set_num_threads(self._best_threads(concurrency))

        shares = {"stack": CpuShares(self.stack), "together": CpuShares(self.together), "engine": CpuShares()}
        senders = {"stack": self._sender, "together": self._together_sender}

        def through(arm: str) -> float:
            with shares[arm].counted():
                return _tokens_per_s(
                    lengths, lambda: self._run(sending.closed(senders[arm], self.jobs(lengths), concurrency))
                )

        def bare_engine() -> float:
            with shares["engine"].counted():
                return _tokens_per_s(lengths, lambda: self._closed(self.jobs(lengths), concurrency))

        arms = {arm: partial(through, arm) for arm in senders}
        arms |= {"engine": bare_engine, "engine again": bare_engine}
        warm = [(PROMPT, 8)] * concurrency
        for sender in senders.values():
            self._run(sending.closed(sender, self.jobs(warm), concurrency))
        self._closed(self.jobs(warm), concurrency)
        found = medians(interleave(arms, num_rounds))
        name = f"concurrency {concurrency}, {PROMPT} + {OUTPUT}"
        engine = found["engine"]
        for arm in senders:
            self.report.add(
                f"{name}: {arm} over engine",
                found[arm],
                "tokens/s",
                against=engine,
                limit=self.limits.output_tokens_per_s(PROMPT, OUTPUT, concurrency),
                goal="ratio >= 0.90",
            )
        self.report.add(f"{name}: A/A, engine over engine", found["engine again"], "tokens/s", against=engine)
        num_tokens = num_jobs * OUTPUT * num_rounds
        engine_us = 1e6 * sum(shares["engine"].seconds.values()) / (2 * num_tokens)
        for arm in senders:
            self._cpu_rows(f"{name}: CPU a token, {arm}", shares[arm], num_tokens, engine_us)

    def _cpu_rows(self, name: str, shares: CpuShares, num_tokens: int, engine_us: float) -> None:
        for part, seconds in (*shares.seconds.items(), ("all", sum(shares.seconds.values()))):
            self.report.add(f"{name}: {part}", 1e6 * seconds / num_tokens, "us", against=engine_us)

    def _best_threads(self, concurrency: int) -> int:
        """Return the number of threads that serves the bare engine best; it has all cores to itself."""
        seconds = {}
        for num_threads in {1, CORES}:
            torch.set_num_threads(num_threads)
            self._closed(self.jobs([(PROMPT, 1)]), 1)  # warm
            seconds[num_threads] = _seconds(lambda: self._closed(self.jobs([(PROMPT, 16)] * concurrency), concurrency))
        return min(seconds, key=seconds.get)

    def _closed(self, jobs: Sequence[Job], concurrency: int) -> None:
        waiting = iter(jobs)
        num_open = sum(self._submit_next(waiting) for _ in range(concurrency))
        while num_open:
            for output in self.engine.step():
                if isinstance(output, RequestEnded):
                    num_open += self._submit_next(waiting) - 1

    def _submit_next(self, waiting: Iterator[Job]) -> bool:
        job = next(waiting, None)
        if job is not None:
            request_id = next(self._request_ids)
            self.engine.submit(bare_engine.bare_request(request_id, job.token_ids, max_tokens=job.num_output))
        return job is not None

    # ---- batching ----

    def batching(self, num_jobs: int, num_rounds: int, batch_size: int = 16) -> None:
        """Measure requests/s on mixed lengths if a place is filled as soon as it is free, and if the whole batch must
        end first. There are many jobs, since even the continuous batch runs empty at the end."""
        lengths = [(self._rng.randrange(16, 129), _heavy_tailed(self._rng)) for _ in range(num_jobs)]

        def continuous() -> float:
            return num_jobs / _seconds(lambda: self._run(sending.closed(self._sender, self.jobs(lengths), batch_size)))

        def static() -> float:
            return num_jobs / _seconds(
                lambda: self._run(sending.in_batches(self._sender, self.jobs(lengths), batch_size))
            )

        arms = {"continuous": continuous, "static": static}
        if num_rounds > 1:
            arms["static again"] = static
        found = medians(interleave(arms, num_rounds))
        against = found["static"]
        name = f"mixed lengths, {batch_size} places"
        self.report.add(
            f"{name}: continuous over static", found["continuous"], "requests/s", against=against, goal="ratio >= 1.6"
        )
        if again := found.get("static again"):
            self.report.add(f"{name}: A/A, static over static", again, "requests/s", against=against)

    # ---- memory ----

    def live_kv(self, num_jobs: int, requests_per_s: float) -> None:
        """Measure tokens whose KV is computed and still needed over the room in reserved blocks, both read from the
        bare engine after each step of a trace with random arrivals and lengths."""
        arrivals = itertools.accumulate(self._rng.expovariate(requests_per_s) for _ in range(num_jobs))
        drawn = zip(self.jobs([_log_normal_lengths(self._rng) for _ in range(num_jobs)]), arrivals, strict=True)
        waiting = deque(replace(job, at_s=arrival_s) for job, arrival_s in drawn)
        begun, num_open, samples = time.perf_counter(), 0, []
        while waiting or num_open:
            while waiting and waiting[0].at_s <= time.perf_counter() - begun:
                num_open += self._submit_next(iter([waiting.popleft()]))
            num_open -= sum(isinstance(output, RequestEnded) for output in self.engine.step())
            if self.engine.has_computed:
                samples.append(self._live_and_held())
            else:
                time.sleep(0.001)
        live, held = (sum(column) / len(samples) for column in zip(*samples, strict=True))
        self.report.add("trace: live KV over held KV", live, "tokens", against=held, goal="ratio >= 0.90")

    def _live_and_held(self) -> tuple[int, int]:
        holders = self.engine.ledger.counts()
        num_held = self.engine.num_blocks - holders["cached"] - holders["free"]
        live = sum(seq.num_computed for group in self.engine.admission.groups.values() for seq in group.live)
        return live, num_held * self.engine.layout.block_size

    # ---- prefix hit ----

    def prefix_hit(self, num_rounds: int) -> None:
        """Measure the TTFT of a prompt that the decode worker has in full, over that of a new one."""
        last: list[Job] = self.jobs([(HIT_PROMPT, 2)])

        def cold() -> float:
            last[0] = self.jobs([(HIT_PROMPT, 2)])[0]
            return self._run(sending.one(self._sender, last[0])).ttft_s

        def hit() -> float:
            outcome = self._run(sending.one(self._sender, last[0]))
            if outcome.num_cached < HIT_PROMPT - 64:
                raise RuntimeError(f"{outcome.num_cached} of {HIT_PROMPT} tokens were cached: no full hit")
            return outcome.ttft_s

        cold()
        found = medians(interleave({"cold": cold, "hit": hit, "hit again": hit}, num_rounds))
        hit_s, cold_s = found["hit"], found["cold"]
        limit_ms = self.limits.prefill_s(HIT_PROMPT) * 1e3
        self.report.add(f"TTFT, {HIT_PROMPT} tokens: cold", cold_s * 1e3, "ms", limit=limit_ms)
        name = f"TTFT, {HIT_PROMPT} tokens: full hit over cold"
        self.report.add(name, hit_s * 1e3, "ms", against=cold_s * 1e3, goal="ratio <= 0.10")
        self.report.add("TTFT: A/A, hit over hit", found["hit again"] * 1e3, "ms", against=hit_s * 1e3)


def _seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _tokens_per_s(lengths: Sequence[tuple[int, int]], action: Callable[[], object]) -> float:
    return sum(num_output for _, num_output in lengths) / _seconds(action)


def _heavy_tailed(rng: random.Random) -> int:
    """Return an answer length: most are short, one in five is long, with mean about 38 and at most 160."""
    return rng.randrange(80, 161) if rng.random() < 0.2 else rng.randrange(4, 33)


def _log_normal_lengths(rng: random.Random) -> tuple[int, int]:
    """Return (prompt, output) lengths with medians of 300 and 80 tokens and a few prompts of 1,500."""
    return min(1500, round(300 * rng.lognormvariate(0, 0.7))), min(400, round(80 * rng.lognormvariate(0, 0.6)))


# ---- the gateway alone ----


def gateway_rows(report: Report, stack: Stack) -> None:
    """Measure the gateway's imports, and its resident memory after the load above."""
    code = "import sys, gateway.__main__; print(sum(name.split('.')[0] == 'torch' for name in sys.modules))"
    num_torch = int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    report.add("gateway: torch modules imported", num_torch, "modules", goal="value <= 0")
    rss = psutil.Process(stack.gateways[0].pid).memory_info().rss
    report.add("gateway: resident memory", rss / 1e6, "MB", goal="value < 120")


def gateway_ready(report: Report, stack: Stack, num_rounds: int) -> None:
    """Measure a second gateway's time to ready, beside workers that run."""
    argv = [sys.executable, "-m", "gateway", "--model", str(MODEL), "--listen", "127.0.0.1:0"]
    argv += ["--prefill-workers", stack.address["prefill0"], "--decode-workers", stack.address["decode0"]]
    report.add("gateway: start to ready", _ready_seconds(argv, stack.folder, num_rounds), "s", goal="value < 3")


def up_ready(report: Report, folder: Path, num_rounds: int) -> None:
    argv = [str(Path(sys.executable).with_name("baton")), "up", "--listen", "127.0.0.1:0"]
    report.add("baton up: start to ready", _ready_seconds(argv, folder, num_rounds), "s", goal="value < 10")


def _ready_seconds(argv: list[str], folder: Path, num_rounds: int) -> float:
    times = []
    for i in range(num_rounds):
        process = Process(f"ready{i}", argv, folder)
        try:
            times.append(_seconds(process.ready))
        finally:
            process.stop()
    return statistics.median(times)


@contextmanager
def running(folder: Path) -> Iterator[tuple[Sequence[Stack], Engine]]:
    with (
        Stack(MODEL, folder / "stack", env=AS_UP) as stack,
        TogetherStack(MODEL, folder / "together", env=AS_UP) as together,
    ):
        yield (stack, together), bare_engine.load_engine(MODEL)


def main() -> int:
    arguments, report = start("stack", "The whole stack against one bare engine, and what serving costs.")
    quick = arguments.quick
    limits = measure(report, MODEL / "model.safetensors")
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        folder = Path(name)
        up_ready(report, folder, 1 if quick else 3)
        with running(folder) as (stacks, engine):
            gateway_ready(report, stacks[0], 1 if quick else 5)
            bench = Bench(report, limits, runner, stacks, engine)
            bench.throughput(1, num_jobs=2 if quick else 4, num_rounds=2 if quick else 9)
            bench.throughput(16, num_jobs=24 if quick else 48, num_rounds=1 if quick else 7)
            bench.batching(num_jobs=96 if quick else 192, num_rounds=1 if quick else 5)
            bench.live_kv(num_jobs=24 if quick else 200, requests_per_s=4)
            bench.prefix_hit(num_rounds=4 if quick else 15)
            gateway_rows(report, stacks[0])
            bench.close()
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
