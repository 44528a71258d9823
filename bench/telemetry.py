"""Measure the cost of telemetry: python bench/telemetry.py [--quick] [--json FILE].

Stacks of one gateway and one decode worker that differ in where their spans and metrics go: nowhere (twice: the A/A
row), to a collector that takes them, to a closed port, and to one that accepts and never answers. All run at once and
take turns, a block of requests each, in any order; workers have one core, everything else the other. A block's cost is the
CPU time of its gateway and its worker from its first request until what they send after the last one is sent, while the
next block runs already; idle time between is the same for all. What is compared are the blocks of one round, with the mean
of the two that have no collector, and of these ratios the median counts: what drifts falls on all alike. /metrics and the
log line are always on: the last rows are what they take, after the last token.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


from baton.loadgen.client import Sender
from bench.lib import sending
from bench.lib.report import Report, finish, start
from gateway.config.slo_classes import BUILT_IN
from gateway.observe import access_log
from gateway.observe.meters import GatewayMeters
from tests.support.gateway.records import ANSWERED, record
from tests.support.process import Process
from tests.support.stack import Stack

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "demo" / "target"
PROMPT, OUTPUT, VOCAB = 48, 64, 4000  # short prompts are read where they are answered
OFF, AGAIN = "off", "off again"
COLLECTORS = ("up", "down", "stalled")
NAMES = (OFF, *COLLECTORS, AGAIN)
NUM_ROUNDS, NUM_REQUESTS = 30, 30  # about four minutes where a token takes 0.6 ms
SENT_S = 1.5  # after the last request: spans leave a process within a second
_PROCESS_CPU = 2  # of a process's clocks, by the kernel's numbering: what its threads have run
CORES = sorted(os.sched_getaffinity(0))


class Block(NamedTuple):
    """What the requests of one arm took in one round."""

    cpu_us: float  # a token, of gateway and worker
    tpot_ms: float  # medians of its requests
    ttft_ms: float


class Arms:
    """A stack an arm, which takes a block of requests a round."""

    def __init__(self, folder: Path, exits: ExitStack, runner: asyncio.Runner):
        self._run = runner.run
        self._rng = random.Random(0)
        self._senders: dict[str, Sender] = {}
        self._processes: dict[str, list[Process]] = {}
        # Not in this process: what it costs there would be the client's time.
        self._receiver = Process("receiver", [sys.executable, "-m", "bench.processes.telemetry_receiver"], folder)
        exits.callback(self._receiver.kill)
        endpoints = {"up": self._receiver.ready()["endpoint"], "down": _closed_port(), "stalled": _deaf_port(exits)}
        for name in NAMES:
            env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoints.get(name, "")}
            options = {"num_prefill": 0, "options": ("--threads", "1", "--num-blocks", "128"), "env": env}
            stack = exits.enter_context(Stack(MODEL, folder / name.replace(" ", "-"), **options))
            _pin(stack.decode[0], CORES[-1])
            _pin(stack.gateways[0], CORES[0])
            self._senders[name] = self._run(sending.connect(stack.target))
            self._processes[name] = stack.processes
        _pin(self._receiver, CORES[0])

    @property
    def num_spans(self) -> int:
        """That the collector has received, a second ago."""
        told = [line for line in self._receiver.out.read_text().splitlines() if line.startswith("spans=")]
        return int(told[-1].removeprefix("spans=")) if told else 0

    def close(self) -> None:
        for sender in self._senders.values():
            self._run(sender.close())

    def cpu_s(self, name: str) -> float:
        """CPU that the processes of an arm have had, threads that are gone included."""
        return sum(time.clock_gettime(~process.pid << 3 | _PROCESS_CPU) for process in self._processes[name])

    def requests(self, name: str, number: int) -> tuple[float, float]:
        """Send them one after the other; returns the medians of TPOT and TTFT in ms."""
        jobs = sending.draw_jobs(self._rng, [(PROMPT, OUTPUT)] * number, VOCAB)
        done = self._run(sending.closed(self._senders[name], jobs, 1))
        tpot_s = statistics.median((each.e2e_s - each.ttft_s) / (OUTPUT - 1) for each in done)
        return 1e3 * tpot_s, 1e3 * statistics.median(each.ttft_s for each in done)


def _pin(process: Process, core: int) -> None:
    """Every thread of it: workers compute on one core, everything else is on the other."""
    for thread in os.listdir(f"/proc/{process.pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def _closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return "http://127.0.0.1:%d" % taken.getsockname()[1]


def _deaf_port(exits: ExitStack) -> str:
    listener = exits.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return "http://127.0.0.1:%d" % listener.getsockname()[1]


def rounds(arms: Arms, num_rounds: int, num_requests: int) -> dict[str, list[Block]]:
    """Return the blocks of each arm, one a round."""
    for name in NAMES:
        arms.requests(name, 8)  # warm
    rng, blocks = random.Random(0), {name: [] for name in NAMES}
    open_blocks: dict[
        str, tuple[float, float, tuple[float, float]]
    ] = {}  # CPU before it, when its requests were done, medians

    def close(now: float) -> None:
        """Count those whose spans have been sent by now."""
        for name, (before_s, done_at, medians) in list(open_blocks.items()):
            if now - done_at >= SENT_S:
                cpu_us = 1e6 * (arms.cpu_s(name) - before_s) / (num_requests * OUTPUT)
                blocks[name].append(Block(cpu_us, *medians))
                del open_blocks[name]

    for _ in range(num_rounds):
        # In any order: an arm that follows itself finds its weights in the cache.
        for name in rng.sample(NAMES, len(NAMES)):
            while name in open_blocks:
                time.sleep(0.05)
                close(time.monotonic())
            before_s = arms.cpu_s(name)
            medians = arms.requests(name, num_requests)
            close(time.monotonic())
            open_blocks[name] = before_s, time.monotonic(), medians
    while open_blocks:
        time.sleep(0.05)
        close(time.monotonic())
    return blocks


def compare(report: Report, blocks: dict[str, list[Block]]) -> None:
    for field, title, unit, goal in (
        ("cpu_us", "CPU of a token", "us", "ratio <= 1.01"), ("tpot_ms", "TPOT", "ms", "ratio <= 1.01")
    ):  # fmt: skip
        values = {name: [getattr(block, field) for block in each] for name, each in blocks.items()}
        off = [statistics.mean(pair) for pair in zip(values[OFF], values[AGAIN], strict=True)]
        base = statistics.median(off)
        for name in COLLECTORS:
            ratio = _ratio(values[name], off)
            report.add(f"{title}: collector {name}, over none", ratio * base, unit, against=base, goal=goal)
        same = _ratio(values[AGAIN], values[OFF])
        report.add(f"{title}: A/A, off over off", same * base, unit, against=base)
        is_cpu = field == "cpu_us"
        report.add(f"{title}: A/A, apart by", 100 * abs(same - 1), "%", goal="value <= 0.3" if is_cpu else "")
    ttft = {name: statistics.median(block.ttft_ms for block in each) for name, each in blocks.items()}
    for name in (*COLLECTORS, AGAIN):
        title = "A/A, off over off" if name == AGAIN else f"collector {name}, over none"
        goal = "" if name == AGAIN else "value <= 0.2"
        report.add(f"TTFT added: {title}", ttft[name] - ttft[OFF], "ms", goal=goal)


def _ratio(values: list[float], against: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(value / other for value, other in zip(values, against, strict=True))


def after_the_last_token(report: Report, num_requests: int) -> None:
    """Measure the gateway's work for a request that has ended: its metrics, its log line."""
    meters = GatewayMeters("tiny", BUILT_IN)
    ended = record(**ANSWERED)
    for name, work in (("metrics", meters.ended), ("log line, without its writing", access_log.line)):
        begun = time.perf_counter()
        for _ in range(num_requests):
            work(ended, None)
        report.add(f"after the last token: {name}", 1e6 * (time.perf_counter() - begun) / num_requests, "us/request")


def main() -> int:
    arguments, report = start("telemetry", "Spans and metrics on against off, with the collector up, down and stalled.")
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner, ExitStack() as exits:
        arms = Arms(Path(name), exits, runner)
        compare(report, rounds(arms, *((2, 10) if arguments.quick else (NUM_ROUNDS, NUM_REQUESTS))))
        arms.close()
        time.sleep(3)  # a process sends its spans within a second
        report.add("spans that the collector received", arms.num_spans, "spans", goal="value >= 1")
    after_the_last_token(report, 500 if arguments.quick else 5000)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
