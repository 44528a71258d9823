"""The report of a bench: rows with a value, its baseline, the machine's limit, a goal, and the noise."""

import argparse
import datetime
import functools
import importlib.metadata
import json
import operator
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from baton.engine.core import cpu
from baton.lines import one_line
from baton.loadgen.summary import percentile

Measured = TypeVar("Measured")

_OPERATORS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}
PACKAGES = ("torch", "grpcio", "protobuf", "tokenizers", "redis")


@dataclass(frozen=True)
class Row:
    """One figure. `ratio` = value / against; `limit` is the machine's best in the same unit."""

    row: str
    value: float
    unit: str
    against: float | None = None
    limit: float | None = None
    ratio: float | None = None
    goal: str = ""  # "ratio >= 0.80", "value < 120"; `met` says whether it is reached
    met: bool | None = None


@dataclass
class Report:
    """The rows of one run, and the machine that they were measured on. `kept` are rows that earlier runs wrote to the
    same file."""

    command: str
    quick: bool
    rows: list[Row] = field(default_factory=list)
    failed: str = ""  # why the run ended early
    kept: list[Row] = field(default_factory=list)

    def add(
        self,
        row: str,
        value: float,
        unit: str,
        *,
        against: float | None = None,
        limit: float | None = None,
        goal: str = "",
    ) -> Row:
        """Add and print a row; `goal` is "ratio|value OP NUMBER"."""
        ratio = value / against if against else None
        made = Row(row, value, unit, against, limit, ratio, goal, _is_met(goal, value, ratio))
        self.rows.append(made)
        print(_line(made), flush=True)
        return made

    def bound(self, name: str, limit: float | None, tolerance: float) -> None:
        """Give a row its limit, where it is known only at the end of a run; none if the row exceeds `tolerance` times
        it, since such a limit was disturbed."""
        index = next(index for index, row in enumerate(self.rows) if row.row == name)
        if limit is not None and self.rows[index].value <= tolerance * limit:
            self.rows[index] = replace(self.rows[index], limit=limit)
            print(f"{name}: limit {limit:.4g}")

    @property
    def all_rows(self) -> list[Row]:
        """Return the kept rows that were not measured again, and this run's own."""
        names = {row.row for row in self.rows}
        return [*(row for row in self.kept if row.row not in names), *self.rows]

    def go_on(self, path: Path) -> None:
        """Keep the rows of a file to which earlier runs wrote other parts. Raises SystemExit if it is from another
        machine."""
        earlier = json.loads(path.read_text())
        for what, here in (("quick", self.quick), ("machine", machine()), ("versions", versions())):
            if earlier[what] != here:
                sys.exit(f"{path} was measured with another {what} ({earlier[what]}): give --json another file")
        self.kept = [Row(**row) for row in earlier["rows"]]
        commands = [each for each in earlier["command"].split("; ") if each != self.command]
        self.command = "; ".join([*commands, self.command])

    def write(self, path: Path) -> None:
        """Write everything as JSON, without anything that names this host."""
        report = {
            "command": self.command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "quick": self.quick,
            "machine": machine(),
            "versions": versions(),
            "rows": [asdict(row) for row in self.all_rows],
        }
        if self.failed:
            report["failed"] = self.failed
        path.write_text(json.dumps(report, indent=1) + "\n")


def start(
    name: str, description: str, parts: Sequence[str] = (), options: Mapping[str, dict] = MappingProxyType({})
) -> tuple[argparse.Namespace, Report]:
    """Parse the command line that all benches share: `python bench/NAME.py [--quick] [--json FILE]`, and [--only PART
    ...] if a bench has parts (arguments.only: those to run; FILE then keeps the rows of other parts). `options`: a
    bench's own, with the arguments of argparse's add_argument.

    After this a bench may end early only by an exception: Python calls no hook for sys.exit, and the rows would be
    lost."""
    parser = argparse.ArgumentParser(prog=f"bench/{name}.py", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    if parts:
        help_text = "these parts only: %(choices)s"
        parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="PART", help=help_text)
    for option, more in options.items():
        parser.add_argument(option, **more)
    arguments = parser.parse_args()
    found = machine()
    print(
        f"{found['cpu']}, tier {found['tier']}, {found['cores']} cores; "
        + ", ".join(f"{k} {v}" for k, v in versions().items())
    )
    print(_HEADER)
    command = f"python bench/{name}.py" + (" --quick" if arguments.quick else "")
    if parts and arguments.only != list(parts):
        command += f" --only {' '.join(arguments.only)}"
    report = Report(command, arguments.quick)
    if "--only" in command and arguments.json and arguments.json.exists():
        report.go_on(arguments.json)
    sys.excepthook = functools.partial(_end_early, arguments, report)
    return arguments, report


def finish(arguments: argparse.Namespace, report: Report) -> int:
    """Write the requested file; return exit status 1 if a goal was missed."""
    if arguments.json:
        report.write(arguments.json)
    missed = [row.row for row in report.rows if row.met is False]
    print(f"missed: {', '.join(missed)}" if missed else "every goal met")
    return 1 if missed else 0


def _end_early(arguments: argparse.Namespace, report: Report, kind: type, error: BaseException, trace) -> None:
    """Keep the rows measured so far, print one line with the reason, and exit with status 1."""
    report.failed = f"{kind.__name__}: {one_line(error) or 'no message'}"
    if arguments.json:
        report.write(arguments.json)
    *_, last = traceback.extract_tb(trace)
    print(f"ended early at {Path(last.filename).name}:{last.lineno}, {len(report.rows)} rows: {report.failed}")


def interleave(arms: dict[str, Callable[[], Measured]], num_rounds: int) -> dict[str, list[Measured]]:
    """Run every arm once a round, in alternating order, so that the machine's drift affects all alike."""
    values: dict[str, list[Measured]] = {name: [] for name in arms}
    for round_index in range(num_rounds):
        names = list(arms) if round_index % 2 == 0 else list(reversed(arms))
        for name in names:
            values[name].append(arms[name]())
    return values


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in values.items()}


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile in milliseconds, never above the largest value. A single value suffices, since a busy machine
    gives few. Raises ValueError without any."""
    if not seconds:
        raise ValueError("nothing came while this was measured")
    return 1e3 * percentile(seconds, percent)


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that `percent` of the values do not exceed: always one that was measured."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


def machine() -> dict[str, str | int | float]:
    """Return the facts on which figures depend, without names or paths."""
    from baton.engine.native.tier import available  # loads torch, which processes that only send load save

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.name(),
        "tier": tiers[-1].name if (tiers := available()) else "none",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _is_met(goal: str, value: float, ratio: float | None) -> bool | None:
    if not goal:
        return None
    what, sign, number = goal.split()
    measured = {"value": value, "ratio": ratio}[what]
    if measured is None:
        raise ValueError(f"goal {goal!r} needs something to measure against")
    if sign not in _OPERATORS:
        raise ValueError(f"goal {goal!r}: {sign!r} is none of {' '.join(_OPERATORS)}")
    return _OPERATORS[sign](measured, float(number))


_HEADER = f"{'row':44} {'value':>10} {'unit':12} {'against':>10} {'limit':>10} {'ratio':>7}  goal"


def _line(row: Row) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    met = {None: "", True: "met", False: "MISSED"}[row.met]
    cells = f"{row.row:44} {number(row.value):>10} {row.unit:12} {number(row.against):>10} {number(row.limit):>10}"
    return f"{cells} {number(row.ratio):>7}  {row.goal} {met}".rstrip()
