"""Measure the cost of telemetry: python bench/telemetry.py [--quick] [--json FILE].

Stacks of one gateway and one decode worker send spans to a collector that accepts them, to a closed port, and to one
that accepts connections and never answers. A request is traced or not, as its `traceparent` says; so the same processes
are compared with themselves, by blocks of requests: untraced, traced, and untraced again (the A/A row), in any order.
(Between two equal stacks the CPU time per token differed by 7.7 %.) All stacks run at the same time and take turns;
workers have one core, everything else the other. A block's cost is the CPU time of its gateway and worker from its
first request until everything after the last one is sent, while the next stack's block runs already; idle time in
between is the same for all. The median of the rounds' ratios counts, since drift affects all alike. /metrics and the
log line are always on: the last rows measure them, after the last token."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import itertools
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


from baton.client import AsyncClient
from baton.loadgen.workload import FIRST_TOKEN
from baton.service.observe.telemetry import TraceContext, format_traceparent
from baton.v1 import inference_pb2 as pb
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, start
from gateway.config.slo_classes import BUILT_IN
from gateway.observe import access_log
from gateway.observe.meters import GatewayMeters
from tests.support.gateway.request_records import ANSWERED, record
from tests.support.process import Process
from tests.support.stack import Stack

PROMPT, OUTPUT, VOCAB = 48, 64, 4000  # short prompts are read by the decode worker
OFF, ON, AGAIN = "off", "on", "off again"
COLLECTORS = ("up", "down", "stalled")
KINDS = (OFF, ON, AGAIN)
NUM_ROUNDS, NUM_REQUESTS = 24, 30  # about ten minutes
SENT_S = 6.5  # after the last request: spans are emitted within a second, and sent every 5 s
_PROCESS_CPU = 2  # of a process's clocks, by the kernel's numbering: what its threads have run
CORES = sorted(os.sched_getaffinity(0))


class Block(NamedTuple):
    """What the requests of one kind took in one round."""

    cpu_us: float  # per token, of gateway and worker
    tpot_ms: float  # medians of its requests
    ttft_ms: float


class Open(NamedTuple):
    """A block whose requests have ended, and whose spans may not be sent yet."""

    kind: str
    before_s: float  # CPU time of its processes before it
    done_at: float
    medians: tuple[float, float]


Blocks = dict[str, dict[str, list[Block]]]  # by collector, then by kind, one per round


class Stacks:
    """One stack per collector, which serves a block of requests of each kind per round."""

    def __init__(self, folder: Path, exits: ExitStack, runner: asyncio.Runner):
        self._run = runner.run
        self._rng = random.Random(0)
        self._clients: dict[str, AsyncClient] = {}
        self._processes: dict[str, list[Process]] = {}
        # Not in this process, where it would count as the client's time.
        self._receiver = Process("receiver", [sys.executable, "-m", "bench.processes.telemetry_receiver"], folder)
        exits.callback(self._receiver.kill)
        endpoints = {"up": self._receiver.ready()["endpoint"], "down": _closed_port(), "stalled": _deaf_port(exits)}
        for name in COLLECTORS:
            env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoints[name]}
            options = {"num_prefill": 0, "options": ("--threads", "1", "--num-blocks", "128"), "env": env}
            stack = exits.enter_context(Stack(MODEL, folder / name, **options))
            _pin(stack.decode[0], CORES[-1])
            _pin(stack.gateways[0], CORES[0])
            self._clients[name] = self._run(_connect(stack.target))
            self._processes[name] = stack.processes
        _pin(self._receiver, CORES[0])

    @property
    def num_spans(self) -> int:
        """The number of spans that the collector had received a second ago."""
        lines = [line for line in self._receiver.out.read_text().splitlines() if line.startswith("spans=")]
        return int(lines[-1].removeprefix("spans=")) if lines else 0

    def close(self) -> None:
        for client in self._clients.values():
            self._run(client.close())

    def cpu_s(self, name: str) -> float:
        """Return the CPU time of the processes of a stack, with that of ended threads."""
        return sum(time.clock_gettime(~process.pid << 3 | _PROCESS_CPU) for process in self._processes[name])

    def requests(self, name: str, kind: str, number: int) -> tuple[float, float]:
        """Send requests one after the other; return the medians of TPOT and TTFT in ms."""
        done = [self._run(self._one(self._clients[name], kind == ON)) for _ in range(number)]
        ttft_s, tpot_s = (statistics.median(column) for column in zip(*done, strict=True))
        return 1e3 * tpot_s, 1e3 * ttft_s

    async def _one(self, client: AsyncClient, is_traced: bool) -> tuple[float, float]:
        """Return TTFT and TPOT of a request, in seconds."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[self._rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(PROMPT)]),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=OUTPUT, ignore_eos=True),
        )
        context = TraceContext(self._rng.randrange(1, 1 << 128), self._rng.randrange(1, 1 << 64), is_traced)
        begun, first, num_tokens = time.perf_counter(), 0.0, 0
        async for message in client.send(request, metadata=(("traceparent", format_traceparent(context)),)):
            first = first or time.perf_counter()
            num_tokens += len(message.token_ids)
        if num_tokens != OUTPUT:
            raise RuntimeError(f"{num_tokens} of {OUTPUT} tokens came")
        return first - begun, (time.perf_counter() - first) / (OUTPUT - 1)


async def _connect(target: str) -> AsyncClient:
    return AsyncClient(target, timeout_s=120.0)


def _pin(process: Process, core: int) -> None:
    """Pin every thread of a process: workers compute on one core, everything else runs on the other."""
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


def rounds(stacks: Stacks, num_rounds: int, num_requests: int) -> Blocks:
    """Return the blocks of each stack."""
    for name in COLLECTORS:
        stacks.requests(name, ON, 8)  # warm
    rng = random.Random(0)
    blocks: Blocks = {name: {kind: [] for kind in KINDS} for name in COLLECTORS}
    open_blocks: dict[str, Open] = {}

    def close(now: float) -> None:
        """Count the blocks whose spans have been sent by now."""
        for name, block in list(open_blocks.items()):
            if now - block.done_at >= SENT_S:
                cpu_us = 1e6 * (stacks.cpu_s(name) - block.before_s) / (num_requests * OUTPUT)
                blocks[name][block.kind].append(Block(cpu_us, *block.medians))
                del open_blocks[name]

    for _ in range(num_rounds):
        orders = {name: rng.sample(KINDS, len(KINDS)) for name in COLLECTORS}
        for turn, name in itertools.product(range(len(KINDS)), COLLECTORS):
            while name in open_blocks:
                time.sleep(0.05)
                close(time.monotonic())
            before_s = stacks.cpu_s(name)
            medians = stacks.requests(name, orders[name][turn], num_requests)
            close(time.monotonic())
            open_blocks[name] = Open(orders[name][turn], before_s, time.monotonic(), medians)
    while open_blocks:
        time.sleep(0.05)
        close(time.monotonic())
    return blocks


def compare(report: Report, blocks: Blocks) -> None:
    for field, title, unit, aa_goal in (
        ("cpu_us", "CPU of a token", "us", "value <= 0.3"),
        ("tpot_ms", "TPOT", "ms", ""),
    ):
        same = []
        for name, kinds in blocks.items():
            off, on, again = ([getattr(block, field) for block in kinds[kind]] for kind in KINDS)
            plain = [statistics.mean(pair) for pair in zip(off, again, strict=True)]
            base = statistics.median(plain)
            row = f"{title}: collector {name}, traced over not"
            report.add(row, _ratio(on, plain) * base, unit, against=base, goal="ratio <= 1.01")
            same += [one / other for one, other in zip(again, off, strict=True)]
        apart = 100 * abs(statistics.median(same) - 1)
        report.add(f"{title}: A/A, not traced over not, apart by", apart, "%", goal=aa_goal)
    for name, kinds in blocks.items():
        off, on, again = (statistics.median(block.ttft_ms for block in kinds[kind]) for kind in KINDS)
        report.add(f"TTFT added: collector {name}, traced over not", on - (off + again) / 2, "ms", goal="value <= 0.2")
        report.add(f"TTFT added: collector {name}, A/A", again - off, "ms")


def _ratio(values: list[float], against: list[float]) -> float:
    """Return the median of the rounds' ratios."""
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
    arguments, report = start("telemetry", "Requests traced and not, with the collector up, down and stalled.")
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner, ExitStack() as exits:
        stacks = Stacks(Path(name), exits, runner)
        compare(report, rounds(stacks, *((1, 20) if arguments.quick else (NUM_ROUNDS, NUM_REQUESTS))))
        stacks.close()
        time.sleep(SENT_S + 1)  # the receiver prints its count each second
        report.add("spans that the collector received", stacks.num_spans, "spans", goal="value >= 1")
    after_the_last_token(report, 500 if arguments.quick else 5000)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
