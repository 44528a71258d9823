"""Let the scaler decide over generated days in virtual time, against an oracle: python bench/scaler.py [--quick]
[--json FILE].

The oracle knows each minute before it comes, and starts workers at once; the scaler's workers serve 90 s after its
decision. The model of a worker is that of `baton plan` for an H100, so no figure depends on the machine that this runs
on.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import sys
from pathlib import Path

from baton.engine.models.registry import read_spec
from baton.planning.devices import find_device
from baton.planning.efficiency import shipped
from baton.planning.scaling.day import generated_day, run_day
from baton.planning.scaling.load_model import StepModel
from baton.planning.scaling.scaler import Scaler, ScalerBounds
from baton.planning.step_time import StepTimes
from baton.service.slo import Slo
from bench.lib.report import Report, finish, start

SHAPE = Path(__file__).resolve().parents[1] / "baton" / "planning" / "shapes" / "llama-3.1-8b"
LOADS = ((200, 2000, 200), (60, 1000, 200))  # most requests a second, mean tokens of prompt and output
START_S = 90.0


def days(report: Report, seeds: range) -> None:
    """Run each day with a new scaler."""
    slo, bounds = Slo(ttft_s=1.0, tpot_s=0.05), ScalerBounds({"prefill": 1, "decode": 1})
    device = find_device("H100")
    assert device is not None
    times = StepTimes(read_spec(SHAPE), device, shipped(device.kind), "none", "bf16")
    model = StepModel(times, slo, 64, 8192)
    for load in LOADS:
        for seed in seeds:
            found = run_day(generated_day(seed, *load), model, Scaler(model, bounds, slo, START_S), bounds, START_S)
            day = f"a day of at most {load[0]} requests/s of {load[1]} + {load[2]}, seed {seed}"
            report.add(f"{day}: worker-hours", found.hours, "h", against=found.oracle_hours, goal="ratio <= 1.15")
            report.add(f"{day}: requests that found too few workers", 100 * found.missed, "%", goal="value <= 0.1")
            report.add(f"{day}: changes taken back within 15 minutes", found.num_turns, "", against=found.num_changes)


def main() -> int:
    arguments, report = start("scaler", __doc__.splitlines()[0])
    days(report, range(1 if arguments.quick else 5))
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
