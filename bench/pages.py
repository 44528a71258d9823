"""Write docs/benchmarks.md from the recorded runs in bench/results: python bench/pages.py."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import json
from pathlib import Path

from bench.lib.paths import ROOT
from bench.lib.tables import ladder, plan

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "bench" / "results"
MAX_ROWS = 40  # of a run that is printed in full; of a longer one, only the rows with a goal and the A/A rows
TABLES = {"ladder": ladder.table, "plan": plan.table}  # of benches whose rows alone would be hard to read
HEAD = "| row | measured | against | limit | ratio | goal | met |\n|---|---|---|---|---|---|---|"
ABOUT = """# Benchmarks

This page is generated from the recorded runs in [bench/results](../bench/results) by `python bench/pages.py`; a test keeps
it fresh. Every run names its command, date and machine, and keeps the rows that lose.

- *against* is what the same run measured beside it (a peer, a bare loop, the other arm), *ratio* is measured over against.
- *limit* is what that machine can do at best, in the same unit.
- An *A/A* row compares an arm with itself: its distance from 1 is the noise of the run.
- Compare ratios, not absolute figures: the runs are of different days and machines.
- [latency.md](latency.md) has what was measured of latencies before and after the token's way was shortened.
"""


def page() -> str:
    """Return the page: the newest run of each bench, full runs before quick ones, sorted by name."""
    sections = [_section(path) for path in _newest()]
    return "\n".join([ABOUT, *sections])


def _newest() -> list[Path]:
    runs: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: ("-quick-" not in path.name, path.stem[-10:])):
        runs[path.stem[:-11].removesuffix("-quick")] = path
    return [runs[name] for name in sorted(runs)]


def _section(path: Path) -> str:
    report = json.loads(path.read_text())
    rows, machine = report["rows"], report["machine"]
    judged = [row["met"] for row in rows if row["met"] is not None]
    met = f"{sum(judged)} of {len(judged)} goals met" if judged else "no goals"
    shown = rows if len(rows) <= MAX_ROWS else [row for row in rows if row["goal"] or "A/A" in row["row"]]
    lines = [
        f"## {path.stem[:-11].removesuffix('-quick').removesuffix('-cpu')}",
        "",
        f"`{report['command']}`, {report['date']}, {_processor(machine)}, {machine['cores']} cores, "
        f"torch {report['versions']['torch']}: {met}. "
        f"[{path.name}](../bench/results/{path.name})" + (f" has {len(rows)} rows." if shown is not rows else ""),
        "",
    ]
    for name, table in TABLES.items():
        if path.name.startswith(f"{name}-"):
            lines += [table(path), ""]
    return "\n".join([*lines, HEAD, *map(_line, shown), ""])


def _processor(machine: dict) -> str:
    """Return the processor with the tier of the kernels, which early runs do not record."""
    return f"{machine['cpu']} ({machine['tier']})" if "tier" in machine else machine["cpu"]


def _line(row: dict) -> str:
    verdict = {None: "", True: "yes", False: "**no**"}[row["met"]]
    cells = (
        row["row"],
        f"{_number(row['value'])} {row['unit']}",
        *(_number(row[name]) for name in ("against", "limit", "ratio")),
        row["goal"],
        verdict,
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    PAGE.write_text(page())
