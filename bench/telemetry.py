"""Measure the cost of telemetry: python bench/telemetry.py [--quick] [--json FILE].

Stacks of one gateway and one decode worker that differ in where their spans and metrics go: nowhere (twice: the A/A
row), to a collector that takes them, to a closed port, and to one that accepts and never answers. All run at once, and
take turns request by request; workers have one core, everything else the other. /metrics and the log line are always
on: the last rows are what they take, after the last token.
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
CORES = sorted(os.sched_getaffinity(0))


class Arms:
    """A stack an arm, which takes one request a round."""

    def __init__(self, folder: Path, exits: ExitStack, runner: asyncio.Runner):
        self._run = runner.run
        self._rng = random.Random(0)
        self._senders: dict[str, Sender] = {}
        self.ttft_s: dict[str, list[float]] = {}
        self.gateways = {}
        # Not in this process: what it costs there would be the client's time.
        self._receiver = Process("receiver", [sys.executable, "-m", "bench.processes.telemetry_receiver"], folder)
        exits.callback(self._receiver.kill)
        endpoints = {"up": self._receiver.ready()["endpoint"], "down": _closed_port(), "stalled": _deaf_port(exits)}
        for name in (OFF, *COLLECTORS, AGAIN):
            env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoints.get(name, "")}
            options = {"num_prefill": 0, "options": ("--threads", "1", "--num-blocks", "128"), "env": env}
            stack = exits.enter_context(Stack(MODEL, folder / name.replace(" ", "-"), **options))
            _pin(stack.decode[0], CORES[-1])
            _pin(stack.gateways[0], CORES[0])
            self._senders[name], self.gateways[name] = self._run(sending.connect(stack.target)), stack.gateways[0]
            self.ttft_s[name] = []
        _pin(self._receiver, CORES[0])

    @property
    def num_spans(self) -> int:
        """That the collector has received, a second ago."""
        told = [line for line in self._receiver.out.read_text().splitlines() if line.startswith("spans=")]
        return int(told[-1].removeprefix("spans=")) if told else 0

    def close(self) -> None:
        for sender in self._senders.values():
            self._run(sender.close())

    def request(self, name: str) -> float:
        """One; returns its whole time in seconds."""
        (job,) = sending.draw_jobs(self._rng, [(PROMPT, OUTPUT)], VOCAB)
        done = self._run(sending.one(self._senders[name], job))
        self.ttft_s[name].append(done.ttft_s)
        return done.e2e_s


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


def traced_or_not(report: Report, arms: Arms, num_rounds: int) -> None:
    names = (OFF, *COLLECTORS, AGAIN)
    for name in names:
        arms.request(name)  # warm
        arms.ttft_s[name].clear()
    rng, whole_s = random.Random(0), {name: [] for name in names}
    for _ in range(num_rounds):
        # In any order: an arm that follows itself finds its weights in the cache.
        for name in rng.sample(names, len(names)):
            whole_s[name].append(arms.request(name))
    whole = _quick(whole_s)
    ttft = _quick(arms.ttft_s)
    # Not the quickest TPOT of a request: that is one whose first token came late.
    tpot = {name: (whole[name] - ttft[name]) / (OUTPUT - 1) for name in names}
    for name in (*COLLECTORS, AGAIN):
        is_same = name == AGAIN
        title = "A/A, off over off" if is_same else f"collector {name}, over none"
        tpot_goal, ttft_goal = ("", "") if is_same else ("ratio <= 1.01", "value <= 0.2")
        report.add(f"TPOT: {title}", 1e3 * tpot[name], "ms", against=1e3 * tpot[OFF], goal=tpot_goal)
        added = 1e3 * (ttft[name] - ttft[OFF])
        report.add(f"TTFT added to {1e3 * ttft[OFF]:.2f} ms: {title}", added, "ms", goal=ttft_goal)


def _quick(values: dict[str, list[float]]) -> dict[str, float]:
    """The quickest fifth of the rounds ends here: a cost is in all of them, the machine's other work is not."""
    return {name: statistics.quantiles(each, n=5)[0] for name, each in values.items()}


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
        traced_or_not(report, arms, 15 if arguments.quick else 110)
        arms.close()
        time.sleep(3)  # a process sends its spans within a second
        report.add("spans that the collector received", arms.num_spans, "spans", goal="value >= 1")
    after_the_last_token(report, 500 if arguments.quick else 5000)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
