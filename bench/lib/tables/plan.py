"""The table of docs/benchmarks.md from a recorded run of bench/plan.py."""

import json
from pathlib import Path

PLANNED = ", planned over measured"  # the end of the names of rows that are points of the grid
HEAD = "| point | TTFT planned | measured | off by | TPOT planned | measured | off by |\n|---|---|---|---|---|---|---|"


def table(path: Path) -> str:
    """Return Markdown: a line for each point of the grid, in milliseconds."""
    points: dict[str, dict[str, dict]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["row"].endswith(PLANNED):
            point, _, what = row["row"].removesuffix(PLANNED).rpartition(": ")
            points.setdefault(point, {})[what] = row
    return "\n".join(
        [HEAD, *(f"| {point} | {_cells(of['TTFT'])} | {_cells(of['TPOT'])} |" for point, of in points.items())]
    )


def _cells(row: dict) -> str:
    return f"{row['value']:.3g} | {row['against']:.3g} | {100 * (row['ratio'] - 1):+.0f} %"
