"""The tables of docs/benchmarks.md from a recorded run of bench/ladder.py."""

import json
from collections.abc import Sequence
from pathlib import Path

SAME = "tokens as the naive server's"
POINTS = ("p50", "p95", "p99", "max")  # of which a run has some


def table(path: Path) -> str:
    """Return Markdown: the techniques added up in the order in which to switch them on, then each alone."""
    report = json.loads(path.read_text())
    rungs: dict[str, dict[str, dict]] = {}
    for row in report["rows"]:
        name, _, what = row["row"].partition(": ")
        if what:
            rungs.setdefault(name, {})[what.partition(" within")[0]] = row
    alone = [name for name in rungs if name.endswith(" alone")]
    added = [name for name in rungs if name not in alone]
    if alone:  # the first technique alone is the first that is added
        rungs[f"+ {alone[0].removesuffix(' alone')}"] = rungs[alone[0]]
        added.insert(1, f"+ {alone[0].removesuffix(' alone')}")
    points = [point for point in POINTS if f"TTFT {point}" in rungs[added[0]]]
    lines = [_head(points), *(_line(name, rungs[name], points) for name in added)]
    if alone:
        lines += ["", "Each alone on the naive server:", "", _head(points)]
        lines += [_line(name, rungs[name], points) for name in alone]
    return "\n".join(lines)


def _head(points: Sequence[str]) -> str:
    times = " / ".join(points)
    columns = f"| rung | requests/s | TTFT {times}, ms | TPOT {times}, ms | goodput, requests/s | KV used over held "
    return f"{columns}| tokens as naive | bits per byte |\n|---|---|---|---|---|---|---|---|"


def _line(name: str, rows: dict[str, dict], points: Sequence[str]) -> str:
    def times(what: str) -> str:
        values = (rows[f"{what} {point}"]["value"] for point in points)
        return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)

    throughput, kv = rows["throughput"], rows.get("KV used over held")
    cells = (
        name,
        f"{throughput['value']:.3g} ({throughput['ratio']:.2g}x){_verdict(throughput)}",
        times("TTFT") + _verdict(rows["TTFT p50"]),
        times("TPOT"),
        f"{rows['goodput']['value']:.3g}",
        f"{kv['value']:.2f}{_verdict(kv)}" if kv else "",
        f"{rows[SAME]['value']:.0%}",
        f"{rows['bits per byte, recorded']['value']:.4f}",
    )
    return f"| {' | '.join(cells)} |"


def _verdict(row: dict) -> str:
    return {None: "", True: ", met", False: ", **missed**"}[row["met"]]
