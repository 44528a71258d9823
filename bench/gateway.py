"""Measure the cost of the gateway itself: python bench/gateway.py [--quick] [--json FILE] [--only PART ...].

Real gateways run between real gRPC clients and a worker that computes nothing (processes/stub_worker.py). The gateway
has one core, worker and clients another one. Prompts are 256 token ids. The delay of a token is measured from its step
to the client that reads it. `against` is a bare grpc.aio server in the gateway's place that writes as many prepared
messages of the same size (processes/writing_server.py): the cost of gRPC alone on this machine."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import bisect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.lib.cpu_time import cpu_s
from bench.lib.paths import MODEL, ROOT
from bench.lib.report import Report, finish, percentile_ms, start
from bench.processes.stub_worker import FIRST_ID, NUM_IDS
from tests.support.process import Process

CORES = sorted(os.sched_getaffinity(0))
PARTS = ("ttft", "tokens", "processes", "refusals", "streams")
RATE = 100
OUTPUT, QUICK_OUTPUT = 400, 200  # tokens of a short-lived stream
HELD_OUTPUT = 1700  # tokens of a stream that should stay open, at one a second


def pinned(core: int, argv: Sequence[str]) -> list[str]:
    """Return a command that runs on one core with all its threads, if there are several cores."""
    return ["taskset", "-c", str(CORES[core % len(CORES)]), *argv] if len(CORES) > 1 else list(argv)


class Fleet:
    """A stub worker and the gateways in front of it."""

    def __init__(self, folder: Path, num_gateways: int, worker_options: Sequence[str], gateway_options: Sequence[str]):
        self._folder, self.log = folder, folder / "steps.json"
        argv = [sys.executable, "-m", "bench.processes.stub_worker", "--model", str(MODEL), "--log", str(self.log)]
        self.worker = Process("worker", pinned(1, [*argv, *worker_options]), folder)
        address = self.worker.ready()["grpc"]
        argv = [
            sys.executable,
            "-m",
            "gateway",
            "--model",
            str(MODEL),
            "--listen",
            "127.0.0.1:0",
            "--decode-workers",
            address,
        ]
        argv += ["--max-concurrent-requests", "4096", "--log-level", "warning", *gateway_options]
        self.gateways = [Process(f"gateway{n}", pinned(0, argv), folder) for n in range(num_gateways)]
        self.targets = [gateway.ready()["grpc"] for gateway in self.gateways]
        self.step_times: list[float] = []  # of the worker, after it has stopped

    def stop(self) -> None:
        for process in (*self.gateways, self.worker):
            process.stop()
        self.step_times = json.loads(self.log.read_text())

    @property
    def gateways_cpu_s(self) -> float:
        return sum(cpu_s(psutil.Process(gateway.pid)) for gateway in self.gateways)


@contextmanager
def fleet(
    num_gateways: int = 1, *, step_ms: float = 10.0, worker: Sequence[str] = (), gateway: Sequence[str] = ()
) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        made = Fleet(Path(folder), num_gateways, ("--step-ms", str(step_ms), *worker), gateway)
        try:
            yield made
        finally:
            made.stop()


@contextmanager
def bare(num_messages: int, step_ms: float = 0.0, num_tokens: int = 1) -> Iterator[tuple[str, psutil.Process]]:
    """Run the server that only writes; yield its address and process."""
    argv = [sys.executable, "-m", "bench.processes.writing_server", *map(str, (num_messages, step_ms, num_tokens))]
    with tempfile.TemporaryDirectory() as folder:
        stub = Process("stub", pinned(0, argv), Path(folder))
        try:
            yield stub.ready()["grpc"], psutil.Process(stub.pid)
        finally:
            stub.stop()


def clients(targets: Sequence[str], what: str, number: float, seconds: float, output: int) -> subprocess.Popen:
    argv = [
        sys.executable,
        "-m",
        "bench.processes.gateway_client",
        ",".join(targets),
        what,
        f"{number:g}",
        str(seconds),
        str(output),
    ]
    return subprocess.Popen(pinned(1, argv), cwd=ROOT, stdout=subprocess.PIPE, text=True)


def seen(process: subprocess.Popen) -> dict:
    """Return the clients' report at their end. Raises RuntimeError if a request failed."""
    out, _ = process.communicate(timeout=1800)
    found = json.loads(out.splitlines()[-1])
    if found["failed"]:
        raise RuntimeError(f"{len(found['failed'])} requests failed, the first with {found['failed'][0]}")
    return found


# ---- parts ----


def ttft(report: Report, is_quick: bool) -> None:
    """Compare with the same client and a server that answers itself, in turn."""
    seconds, rounds = (2, 1) if is_quick else (10, 3)
    ttft_s: dict[str, list[float]] = {"alone": [], "through": [], "through again": []}
    spent_s = dict.fromkeys(ttft_s, 0.0)
    with fleet() as made, bare(8) as (address, process):
        targets = {"alone": [address], "through": made.targets, "through again": made.targets}
        servers = dict.fromkeys(targets, psutil.Process(made.gateways[0].pid)) | {"alone": process}
        for number in range(rounds):
            for name in sorted(targets, reverse=number % 2 == 1):
                before = cpu_s(servers[name])
                ttft_s[name] += seen(clients(targets[name], "rate", RATE, seconds, 8))["ttft_s"]
                spent_s[name] += cpu_s(servers[name]) - before
    for percentile, goal in ((50, "value <= 1.5"), (99, "value <= 5")):
        alone, through, again = (percentile_ms(each, percentile) for each in ttft_s.values())
        report.add(f"{RATE} requests/s: TTFT, p{percentile}", through, "ms", against=alone)
        report.add(f"{RATE} requests/s: added to TTFT, p{percentile}", through - alone, "ms", goal=goal)
        report.add(f"{RATE} requests/s: TTFT, p{percentile}: A/A", again, "ms", against=through)

    alone, through, again = (1e6 * spent_s[name] / len(each) for name, each in ttft_s.items())
    report.add(f"{RATE} requests/s: CPU of a request of 8 tokens", through, "us", against=alone)
    report.add(f"{RATE} requests/s: CPU of a request of 8 tokens: A/A", again, "us", against=through)


def steady(found: dict) -> list[tuple[int, float]]:
    """Return the tokens that came while all streams were open."""
    begin, end = found["steady"]
    return [(token_id, at) for token_id, at in found["arrivals"] if begin <= at < end]


def delays(found: dict, step_times: Sequence[float]) -> list[float]:
    """Return the seconds from each token's step to its client."""
    late = []
    for token_id, at in steady(found):
        newest = bisect.bisect_right(step_times, at) - 1
        number = newest - (newest - (token_id - FIRST_ID)) % NUM_IDS
        if token_id != FIRST_ID and number >= 0:  # the id of first tokens equals one of these
            late.append(at - step_times[number])
    return late


def tokens(report: Report, is_quick: bool) -> None:
    """Measure with steps of 10 ms, in which 100 tokens per second and stream are made."""
    seconds, output = (2, QUICK_OUTPUT) if is_quick else (20, OUTPUT)
    for num_streams in (64, 256):
        with fleet() as made:
            before = made.gateways_cpu_s
            found = seen(clients(made.targets, "closed", num_streams, seconds, output))
            spent_s = made.gateways_cpu_s - before
        merged = found["num_tokens"] / found["num_messages"]
        bare_us = bare_message_us(num_streams, max(1, round(merged)), seconds, output)
        begin, end = found["steady"]
        rate, offered = len(steady(found)) / (end - begin), num_streams * 100
        name = f"{num_streams} clients, {offered:,} tokens/s made"
        goal = "value >= 20000" if offered > 20_000 else ""
        most = 1e6 * merged / bare_us
        report.add(f"{name}: tokens/s delivered", rate, "tokens/s", against=offered, limit=most, goal=goal)
        late = delays(found, made.step_times)
        report.add(f"{name}: way of a token, p50", percentile_ms(late, 50), "ms")
        report.add(f"{name}: way of a token, p99", percentile_ms(late, 99), "ms", goal="value <= 20")
        report.add(f"{name}: tokens a message", merged, "tokens", goal="value <= 1.05" if offered < 8000 else "")
        report.add(f"{name}: CPU of a message", 1e6 * spent_s / found["num_messages"], "us", against=bare_us)
        report.add(f"{name}: CPU", 1e3 * spent_s / (found["num_tokens"] / 1e3), "ms/1,000 tokens")


def bare_message_us(num_streams: int, num_tokens: int, seconds: float, output: int) -> float:
    """Return the CPU time of a message if only gRPC is at work, requests included."""
    with bare(output // num_tokens, 10.0 * num_tokens, num_tokens) as (address, process):
        before = cpu_s(process)
        found = seen(clients([address], "closed", num_streams, seconds, output))
        spent_s = cpu_s(process) - before
    return 1e6 * spent_s / found["num_messages"]


def processes(report: Report, is_quick: bool) -> None:
    """Measure four gateways on one core: with four times the streams of one, and with the same streams divided among
    them, when a step's message from the worker carries a quarter."""
    seconds, rounds, output = (2, 1, QUICK_OUTPUT) if is_quick else (6, 3, OUTPUT)
    cost: dict[tuple[int, int], list[float]] = {(1, 16): [], (4, 64): [], (1, 64): []}
    for number in range(rounds):
        for num_gateways, num_streams in list(cost)[:: 1 if number % 2 == 0 else -1]:
            with fleet(num_gateways) as made:
                before = made.gateways_cpu_s
                found = seen(clients(made.targets, "closed", num_streams, seconds, output))
                ms = 1e3 * (made.gateways_cpu_s - before) / (found["num_tokens"] / 1e3)
            cost[num_gateways, num_streams].append(ms)
    one, four, all_in_one = (statistics.median(each) for each in cost.values())
    unit = "ms/1,000 tokens"
    report.add("16 streams each, four gateways over one: CPU", four, unit, against=one, goal="ratio <= 1.05")
    report.add("64 streams, four gateways over one: CPU", four, unit, against=all_in_one)
    if rounds > 1:
        again = cost[1, 16]
        report.add("A/A, one gateway: highest over lowest CPU", max(again), unit, against=min(again))


def refusals(report: Report, is_quick: bool) -> None:
    """Measure refusals by a gateway whose worker is full and where no request may wait."""
    with fleet(worker=("--full",), gateway=("--max-queued-requests", "0")) as made:
        before = made.gateways_cpu_s
        found = seen(clients(made.targets, "rate", 200, 2 if is_quick else 15, 8))
        spent_s = made.gateways_cpu_s - before
    if not found["refused_s"] or found["ttft_s"]:
        raise RuntimeError("a full worker's requests were not refused")
    report.add("200 refusals/s: p50", percentile_ms(found["refused_s"], 50), "ms")
    report.add("200 refusals/s: p99", percentile_ms(found["refused_s"], 99), "ms", goal="value <= 20")
    report.add("200 refusals/s: CPU of a refusal", 1e6 * spent_s / len(found["refused_s"]), "us")


def streams(report: Report, is_quick: bool) -> None:
    """Measure streams that stay open and get a token a second."""
    number, held_s = (300, 2) if is_quick else (2000, 240)
    with bare(HELD_OUTPUT, 1000.0) as (address, process):
        alone, _, _ = held([address], process, number, 1)
    with fleet(step_ms=1000.0, gateway=("--max-timeout-s", "1800")) as made:
        process = psutil.Process(made.gateways[0].pid)
        ours, grown, found = held(made.targets, process, number, held_s)
    name = f"{number:,} open streams"
    report.add(f"{name}: memory of one", ours / 1024, "KiB", against=alone / 1024)
    report.add(f"{name}: memory of one beyond a bare server's", (ours - alone) / 1024, "KiB", goal="value <= 10")
    report.add(f"{name}, {held_s} s later: memory grown", grown / 2**20, "MiB")
    report.add(f"{name}: tokens that came", found["num_tokens"] / number, "tokens/stream")


def held(targets: Sequence[str], process: psutil.Process, number: int, seconds: float) -> tuple[float, float, dict]:
    """Return the bytes per stream that the process takes, its growth while they were open, and the clients' report."""
    first = opened(targets, 100, 3600)  # the first streams load modules, and free memory that later ones reuse
    before = process.memory_info().rss
    holding = opened(targets, number, seconds)
    taken = process.memory_info().rss
    found = seen(holding)
    grown = process.memory_info().rss - taken
    first.kill()
    first.wait()
    return (taken - before) / number, grown, found


def opened(targets: Sequence[str], number: int, seconds: float) -> subprocess.Popen:
    """Start clients that hold streams open; return once the streams are open."""
    holding = clients(targets, "held", number, seconds, HELD_OUTPUT)
    if holding.stdout.readline().strip() != "open":
        raise RuntimeError("not every stream was opened")
    return holding


def main() -> int:
    arguments, report = start("gateway", "What the gateway itself costs.", PARTS)
    for part in arguments.only:
        globals()[part](report, arguments.quick)
    return finish(arguments, report)


if __name__ == "__main__":
    raise SystemExit(main())
