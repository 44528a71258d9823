"""Measure what the HTTP API costs compared with gRPC: python bench/http_api.py [--quick] [--json FILE] [--only PART
...].

One gateway with a worker that computes nothing serves both, and clients of both take turns: gRPC, HTTP, gRPC again,
whose distance from the first is the noise. All send the same load. Prompts are 256 token ids; an HTTP stream carries
token ids too."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import statistics
import subprocess
import sys
from collections.abc import Callable

from bench.gateway import Fleet, clients, fleet, pinned, seen
from bench.lib.paths import ROOT
from bench.lib.report import Report, finish, interleave, medians, percentile_ms, start

PARTS = ("cpu", "ttft", "streams")
GRPC, HTTP, AGAIN = ARMS = ("gRPC", "HTTP", "gRPC again")
Ask = Callable[[int, float, int], dict]
"""(streams at once, seconds, tokens of each in the mean) -> what the clients saw."""


def asks(made: Fleet) -> dict[str, Ask]:
    """Return how to ask the gateway, for each arm."""

    def grpc(number: int, seconds: float, output: int) -> dict:
        return seen(clients(made.targets, "closed", number, seconds, output))

    def http(number: int, seconds: float, output: int) -> dict:
        target = made.gateways[0].ready()["http"]
        argv = [sys.executable, "-m", "bench.processes.http_client", target, *map(str, (number, seconds, output))]
        return seen(subprocess.Popen(pinned(1, argv), cwd=ROOT, stdout=subprocess.PIPE, text=True))

    return {GRPC: grpc, HTTP: http, AGAIN: grpc}


def cpu(report: Report, is_quick: bool) -> None:
    """Measure the gateway's CPU time per token, requests included, at 100 tokens a second per stream."""
    number, seconds, rounds = (16, 2, 2) if is_quick else (64, 10, 5)

    with fleet(gateway=("--http", "127.0.0.1:0")) as made:

        def us_of(ask: Ask) -> float:
            before = made.gateways_cpu_s
            found = ask(number, seconds, 200)
            return 1e6 * (made.gateways_cpu_s - before) / found["num_tokens"]

        found = medians(interleave({arm: lambda ask=ask: us_of(ask) for arm, ask in asks(made).items()}, rounds))
    name = f"{number} streams: CPU of a token"
    report.add(f"{name}, HTTP over gRPC", found[HTTP], "us", against=found[GRPC], goal="ratio <= 1.3")
    report.add(f"{name}, A/A", found[AGAIN], "us", against=found[GRPC])


def ttft(report: Report, is_quick: bool) -> None:
    """Measure the time to the first token of consecutive streams."""
    seconds, rounds = (1, 3) if is_quick else (4, 9)

    with fleet(step_ms=1.0, gateway=("--http", "127.0.0.1:0")) as made:

        def ms_of(ask: Ask) -> float:
            return percentile_ms(ask(1, seconds, 2)["ttft_s"], 50)

        found = medians(interleave({arm: lambda ask=ask: ms_of(ask) for arm, ask in asks(made).items()}, rounds))
    report.add("1 stream: TTFT of HTTP, p50", found[HTTP], "ms", against=found[GRPC])
    report.add("1 stream: added to TTFT by HTTP", found[HTTP] - found[GRPC], "ms", goal="value <= 0.5")
    report.add("1 stream: added to TTFT, A/A", found[AGAIN] - found[GRPC], "ms")


def streams(report: Report, is_quick: bool) -> None:
    """Measure many concurrent streams. The bench ends if one lacks tokens."""
    number, seconds = (64, 2) if is_quick else (256, 15)
    with fleet(step_ms=50.0, gateway=("--http", "127.0.0.1:0")) as made:
        found = asks(made)[HTTP](number, seconds, 40)
    report.add(f"{number} streams over HTTP: TTFT, p50", 1e3 * statistics.median(found["ttft_s"]), "ms")
    begin, end = found["steady"]  # answers that are still being written then have tokens outside this time
    num_tokens = sum(begin <= at < end for _, at in found["arrivals"])
    report.add(f"{number} streams over HTTP: tokens a second", num_tokens / (end - begin), "tokens/s")


def main() -> int:
    arguments, report = start("http_api", "What the HTTP API costs beside gRPC.", PARTS)
    for part in arguments.only:
        globals()[part](report, arguments.quick)
    return finish(arguments, report)


if __name__ == "__main__":
    raise SystemExit(main())
