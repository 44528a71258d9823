"""A fleet larger than any machine at hand: python bench/fleet.py [--trace FILE] [--quick] [--json FILE].

1,000 workers and 100 gateways (64 and 8 with --quick) serve a trace in simulated time, in as many copies as keep half
of the prefill workers busy; simulation/live_fleet.py says what is modelled. Meanwhile a twentieth of the workers die,
Redis fails over, and a tenth of the workers are replaced by a version that fails everything. Then the scaler follows a
load that doubles and falls. Routing, admission, queues, breakers and the scaler's decisions are the product's own."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import sys
import time
from collections.abc import Callable, Sequence

from baton.loadgen.trace import TraceEntry, read_trace
from baton.planning.scaling.scaler import Scaler, ScalerBounds
from baton.service.slo import Slo
from bench.lib.report import Report, finish, start
from bench.routing import SLO, TRACE, TRACE_OPTION, WORKERS_A_TRACE, busy
from bench.simulation.autoscaling import Autoscaling
from bench.simulation.drawn_load import drawn_load
from bench.simulation.fleet import Machine, copies
from bench.simulation.live_fleet import LiveFleet, met_between
from bench.simulation.machine_model import MachineModel

SCALER_SLO = Slo(2.0, 0.05)
START_S = 60.0


def fault(
    report: Report,
    name: str,
    entries: Sequence[TraceEntry],
    sizes: tuple[int, int],
    begin: Callable[[LiveFleet, float], float],
) -> None:
    """Serve the trace with one fault in its middle. `begin(fleet, at_s)` schedules it and returns when it ends."""
    num_workers, num_gateways = sizes
    fleet, at_s, last_s = (
        LiveFleet(num_workers, num_gateways, Machine(), SLO),
        entries[len(entries) // 3].at_s,
        entries[-1].at_s,
    )
    over_s = begin(fleet, at_s)
    begun = time.process_time()
    asked = fleet.serve(entries)
    seconds = time.process_time() - begun
    lost = sum(not one.ended or bool(one.refused) or one.num_done < one.entry.num_output for one in asked)
    before = met_between(asked, SLO, 0, at_s)
    report.add(f"{name}: requests lost or refused of {len(asked):,}", lost, "requests", goal="value <= 0")
    report.add(f"{name}: within the SLO before", 100 * before, "%")
    if over_s > at_s:
        report.add(f"{name}: while it lasts", 100 * met_between(asked, SLO, at_s, over_s), "%", against=100 * before)
    after = 100 * met_between(asked, SLO, over_s + 5, last_s)
    report.add(f"{name}: from 5 s after it", after, "%", against=100 * before, goal="ratio >= 0.97")
    report.add(f"{name}: attempts a request, at most", max(one.num_attempts for one in asked), "attempts")
    report.add(f"{name}: attempts that failed", sum(fleet.num_failures.values()), "attempts")
    report.add(f"{name}: simulation, a request", 1e6 * seconds / len(asked), "us")


def nothing(fleet: LiveFleet, at_s: float) -> float:
    return at_s


def nodes_die(fleet: LiveFleet, at_s: float) -> float:
    fleet.kill_at(at_s, max(1, fleet.num_workers // 20))
    return at_s + 5


def redis_fails_over(fleet: LiveFleet, at_s: float) -> float:
    fleet.lose_redis_at(at_s, 5)
    return at_s + 15


def rollout_goes_bad(fleet: LiveFleet, at_s: float) -> float:
    fleet.roll_out_at(at_s, max(1, fleet.num_workers // 10), at_s + 10)
    return at_s + 10


def scaled(report: Report, num_gateways: int, rate: float) -> None:
    """Measure the scaler with a fleet that starts too large, under a load that doubles suddenly and falls to a
    tenth."""

    def rate_at(second: float) -> float:
        return rate if second < 900 else 2 * rate if second < 1800 else rate / 10

    bounds = ScalerBounds({"prefill": 1, "decode": 1}, {"prefill": 500, "decode": 500}, 1000)
    size = max(4, int(2 * rate * 0.25))
    fleet = LiveFleet(size, num_gateways, Machine(), SCALER_SLO)
    scaler = Scaler(MachineModel(Machine(), SCALER_SLO), bounds, SCALER_SLO, START_S)
    scaling = Autoscaling(fleet, scaler, START_S)
    asked = fleet.serve(drawn_load(rate_at, 3600, (1000, 60)))
    totals = [prefill + decode for _, prefill, decode in scaling.sizes]
    turns = _turns(totals)
    calm = [one for one in asked if not 900 <= one.entry.at_s < 900 + 4 * START_S]
    report.add(
        "scaler: workers at first, and at the end of the quiet",
        totals[-1],
        "workers",
        against=size,
        goal="ratio <= 0.5",
    )
    report.add("scaler: most workers", max(totals[15:]), "workers", against=totals[14])
    report.add("scaler: changes of direction", turns, "turns", goal="value <= 4")
    met = sum(one.met(SCALER_SLO) for one in calm) / len(calm)
    report.add("scaler: within the SLO, 4 minutes after the step aside", 100 * met, "%", goal="value >= 99")
    report.add(
        "scaler: within the SLO in those 4 minutes", 100 * met_between(asked, SCALER_SLO, 900, 900 + 4 * START_S), "%"
    )


def _turns(sizes: Sequence[int]) -> int:
    moves = [later - earlier for earlier, later in zip(sizes, sizes[1:], strict=False) if later != earlier]
    return sum((one > 0) != (other > 0) for one, other in zip(moves, moves[1:], strict=False))


def main() -> int:
    description = "A fleet of 1,000 workers and 100 gateways, and what happens to it."
    arguments, report = start("fleet", description, options=TRACE_OPTION)
    trace = busy(read_trace(arguments.trace))
    if arguments.trace != TRACE:
        report.command += f" --trace FILE ({len(trace):,} requests)"
    sizes = (64, 8) if arguments.quick else (1000, 100)
    entries = copies(trace[:400], sizes[0] // WORKERS_A_TRACE)
    for name, begin in (
        ("nothing happens", nothing), ("a twentieth dies", nodes_die), ("Redis fails over", redis_fails_over),
        ("a bad rollout", rollout_goes_bad),
    ):  # fmt: skip
        fault(report, name, entries, sizes, begin)
    scaled(report, sizes[1], 20 if arguments.quick else 200)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
