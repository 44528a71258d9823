"""What the gateway itself costs: python bench/gateway.py [--quick] [--json FILE] [--only PART ...].

Real gateways between real gRPC clients and a worker that computes nothing (bench/stub_worker.py). The gateway has one
core, worker and clients another one. Prompts are 256 token ids. A token's way is measured from the step that made it to
the client that reads it.
"""

import bisect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from report import Report, finish, start  # noqa: E402
from stub_worker import FIRST_ID, NUM_IDS  # noqa: E402
from tests.process import Process  # noqa: E402

MODEL = ROOT / "demo" / "target"
CORES = sorted(os.sched_getaffinity(0))
PARTS = ("ttft", "tokens", "processes", "refusals", "streams")
RATE = 100
HELD_OUTPUT = 1700  # tokens of a stream that is to stay open, one a second


def pinned(core: int, argv: Sequence[str]) -> list[str]:
    """A whole process with all its threads on one core, where there are several."""
    return ["taskset", "-c", str(CORES[core % len(CORES)]), *argv] if len(CORES) > 1 else list(argv)


class Fleet:
    """A stub worker and gateways before it."""

    def __init__(self, folder: Path, num_gateways: int, worker_options: Sequence[str], gateway_options: Sequence[str]):
        self._folder, self.log = folder, folder / "steps.json"
        argv = [sys.executable, str(ROOT / "bench" / "stub_worker.py"), "--model", str(MODEL), "--log", str(self.log)]
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
        self.step_times: list[float] = []  # of the worker, once it has stopped

    def stop(self) -> None:
        for process in (*self.gateways, self.worker):
            process.stop()
        self.step_times = json.loads(self.log.read_text())

    @property
    def cpu_s(self) -> float:
        times = [psutil.Process(gateway.pid).cpu_times() for gateway in self.gateways]
        return sum(each.user + each.system for each in times)


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


def clients(targets: Sequence[str], what: str, number: float, seconds: float, output: int) -> subprocess.Popen:
    argv = [
        sys.executable,
        str(ROOT / "bench" / "gateway_client.py"),
        ",".join(targets),
        what,
        f"{number:g}",
        str(seconds),
        str(output),
    ]
    return subprocess.Popen(pinned(1, argv), stdout=subprocess.PIPE, text=True)


def seen(process: subprocess.Popen) -> dict:
    """What the clients say at their end."""
    out, _ = process.communicate(timeout=1800)
    found = json.loads(out.splitlines()[-1])
    if found["failed"]:
        sys.exit(f"{len(found['failed'])} requests failed, the first with {found['failed'][0]}")
    return found


def percentile_ms(seconds: Sequence[float], percentile: int) -> float:
    return 1e3 * statistics.quantiles(seconds, n=100)[percentile - 1]


# ---- parts ----


def ttft(report: Report, is_quick: bool) -> None:
    """Against the same client and a server that answers by itself, in turn."""
    seconds, rounds = (3, 1) if is_quick else (10, 4)
    through: list[float] = []
    bare: list[float] = []
    with fleet() as made, ExitStack() as exits:
        stub = Process(
            "stub", pinned(0, [sys.executable, str(ROOT / "bench" / "loadgen_stub.py"), "8"]), made.log.parent
        )
        exits.callback(stub.stop)
        targets = {"bare": [stub.ready()["grpc"]], "through": made.targets}
        for number in range(rounds):
            for name in sorted(targets, reverse=number % 2 == 1):
                found = seen(clients(targets[name], "rate", RATE, seconds, 8))["ttft_s"]
                (bare if name == "bare" else through).extend(found)
    for percentile, goal in ((50, "value <= 1.5"), (99, "value <= 5")):
        added = percentile_ms(through, percentile) - percentile_ms(bare, percentile)
        report.add(f"{RATE} requests/s: added to TTFT, p{percentile}", added, "ms", goal=goal)
        report.add(f"{RATE} requests/s: TTFT of the bare server, p{percentile}", percentile_ms(bare, percentile), "ms")


def delays(found: dict, step_times: Sequence[float]) -> list[float]:
    """Seconds from a token's step to its client."""
    late = []
    for token_id, at in found["arrivals"]:
        newest = bisect.bisect_right(step_times, at) - 1
        number = newest - (newest - (token_id - FIRST_ID)) % NUM_IDS
        if token_id != FIRST_ID and number >= 0:  # which is also the id of first tokens
            late.append(at - step_times[number])
    return late


def tokens(report: Report, is_quick: bool) -> None:
    """Steps of 10 ms: as many tokens as streams times 100 a second are made."""
    seconds = 4 if is_quick else 20
    for num_streams in (64, 256):
        with fleet() as made:
            before = made.cpu_s
            found = seen(clients(made.targets, "closed", num_streams, seconds, 400))
            cpu_s = made.cpu_s - before
        times, offered = [at for _, at in found["arrivals"]], num_streams * 100
        rate = len(times) / (max(times) - min(times))
        name = f"{num_streams} clients, {offered:,} tokens/s made"
        goal = "value >= 20000" if offered > 20_000 else ""
        report.add(f"{name}: tokens/s delivered", rate, "tokens/s", against=offered, goal=goal)
        late = delays(found, made.step_times)
        report.add(f"{name}: way of a token, p50", percentile_ms(late, 50), "ms")
        report.add(f"{name}: way of a token, p99", percentile_ms(late, 99), "ms", goal="value <= 20")
        merged = found["num_tokens"] / found["num_messages"]
        report.add(f"{name}: tokens a message", merged, "tokens", goal="value <= 1.05" if offered < 8000 else "")
        report.add(f"{name}: gateway's CPU", 1e3 * cpu_s / (found["num_tokens"] / 1e3), "ms/1,000 tokens")


def processes(report: Report, is_quick: bool) -> None:
    """The same 64 streams through one gateway and through four."""
    seconds, rounds = (3, 1) if is_quick else (8, 3)
    cost: dict[int, list[float]] = {1: [], 4: []}
    for number in range(rounds):
        for num_gateways in (1, 4) if number % 2 == 0 else (4, 1):
            with fleet(num_gateways) as made:
                before = made.cpu_s
                found = seen(clients(made.targets, "closed", 64, seconds, 400))
                cost[num_gateways].append(1e3 * (made.cpu_s - before) / (found["num_tokens"] / 1e3))
    one, four = statistics.median(cost[1]), statistics.median(cost[4])
    report.add("four gateways over one: CPU", four, "ms/1,000 tokens", against=one, goal="ratio <= 1.05")
    if rounds > 1:
        report.add("A/A, one gateway: highest over lowest CPU", max(cost[1]), "ms/1,000 tokens", against=min(cost[1]))


def refusals(report: Report, is_quick: bool) -> None:
    """A worker that is full, and nobody may wait."""
    with fleet(worker=("--full",), gateway=("--max-queued-requests", "0")) as made:
        found = seen(clients(made.targets, "rate", 200, 3 if is_quick else 15, 8))
    if not found["refused_s"] or found["ttft_s"]:
        sys.exit("a full worker's requests were not refused")
    report.add("200 refusals/s: p50", percentile_ms(found["refused_s"], 50), "ms")
    report.add("200 refusals/s: p99", percentile_ms(found["refused_s"], 99), "ms", goal="value <= 20")


def streams(report: Report, is_quick: bool) -> None:
    """Streams that stay open and get a token a second."""
    number, held_s = (300, 3) if is_quick else (2000, 600)
    with fleet(step_ms=1000.0, gateway=("--max-timeout-s", "1800")) as made:
        warm = clients(made.targets, "held", 100, 1, HELD_OUTPUT)
        seen(warm)
        process = psutil.Process(made.gateways[0].pid)
        before = process.memory_info().rss
        holding = clients(made.targets, "held", number, held_s, HELD_OUTPUT)
        if holding.stdout.readline().strip() != "open":
            sys.exit("not every stream was opened")
        opened = process.memory_info().rss
        found = seen(holding)
        grown = process.memory_info().rss - opened
    report.add(f"{number:,} open streams: memory of one", (opened - before) / number / 1024, "KiB", goal="value <= 25")
    report.add(f"{number:,} open streams, {held_s} s later: memory grown", grown / 2**20, "MiB")
    report.add(f"{number:,} open streams: tokens that came", found["num_tokens"] / number, "tokens/stream")


def main() -> int:
    arguments, report = start("gateway", "What the gateway itself costs.", PARTS)
    for part in arguments.only:
        globals()[part](report, arguments.quick)
    return finish(arguments, report)


if __name__ == "__main__":
    raise SystemExit(main())
