"""Compare two runs: their figures side by side, with a confidence interval of the ratios."""

import csv
import html
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from baton.loadgen import plot
from baton.loadgen.report import STYLE
from baton.loadgen.summary import percentile

_NUM_RESAMPLES, _NUM_PARTS = 1000, 20  # rates are resampled from this many equal parts of a run
_LATENCIES = {
    "TTFT p50, ms": ("ttft_s", 50),
    "TTFT p99, ms": ("ttft_s", 99),
    "TPOT p50, ms": ("tpot_s", 50),
    "TPOT p99, ms": ("tpot_s", 99),
    "end to end p99, ms": ("e2e_s", 99),
}
_RATES = {"requests/s": "requests_per_s", "output tokens/s": "output_tokens_per_s"}


@dataclass(frozen=True)
class RecordedRun:
    """A folder that `baton bench --out` wrote: its summary, and the answered rows of requests.csv."""

    summary: Mapping[str, Any]
    answered: Sequence[Mapping[str, str]]

    def latencies(self, column: str) -> list[float]:
        """Return the latencies of a column in milliseconds."""
        return [1e3 * float(row[column]) for row in self.answered if row[column]]

    def parts(self, key: str) -> list[float]:
        """Return the rate `key` of the summary in each of _NUM_PARTS equal parts of the run."""
        width_s = max(self.summary["duration_s"], 1e-9) / _NUM_PARTS
        counts = [0.0] * _NUM_PARTS
        for row in self.answered:
            part = min(int(float(row["last_s"]) / width_s), _NUM_PARTS - 1)
            counts[part] += 1 if key == "requests_per_s" else int(row["num_output"])
        return [count / width_s for count in counts]


class Figure(NamedTuple):
    """One figure of runs A and B. 95 % of the ratios B / A of resampled runs lie between `low` and `high`."""

    name: str
    a: float | None
    b: float | None
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return ""
        if self.low <= 1 <= self.high:
            return "no difference seen"
        return "more" if self.low > 1 else "less"


def read_run(folder: Path) -> RecordedRun:
    """Read a run's folder. Raises ValueError that names the invalid file."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text())
        for key in ("requests_per_s", "output_tokens_per_s", "duration_s", "goodput_per_s", "workload", "valid"):
            summary[key]
        path = folder / "requests.csv"
        with path.open(newline="") as file:
            answered = [row for row in csv.DictReader(file) if row["status"] == "OK"]
        run = RecordedRun(summary, answered)
        for column, _ in _LATENCIES.values():
            run.latencies(column)
        run.parts("output_tokens_per_s")
        return run
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not of a run that `baton bench --out` wrote ({error})") from None


def figures(a: RecordedRun, b: RecordedRun) -> list[Figure]:
    """Return the figures of two runs: rates first, then latencies."""
    found = []
    for name, key in _RATES.items():
        interval = _interval(a.parts(key), b.parts(key), lambda parts: sum(parts) / len(parts))
        found.append(Figure(name, a.summary[key], b.summary[key], *interval))
    found.append(Figure("goodput/s", a.summary["goodput_per_s"], b.summary["goodput_per_s"]))
    for name, (column, percent) in _LATENCIES.items():
        first, second = a.latencies(column), b.latencies(column)
        if first and second:

            def point(values: Sequence[float], percent: float = percent) -> float:
                return percentile(values, percent)

            found.append(Figure(name, point(first), point(second), *_interval(first, second, point)))
    return found


def _interval(
    a: Sequence[float], b: Sequence[float], point: Callable[[Sequence[float]], float]
) -> tuple[float, float] | tuple[None, None]:
    """Return the bootstrap interval of point(b) / point(a): the middle 95 % of the ratios of runs drawn from both with
    replacement. The result depends on the runs only."""
    rng = random.Random(0)
    ratios = []
    for _ in range(_NUM_RESAMPLES):
        base, other = point(rng.choices(a, k=len(a))), point(rng.choices(b, k=len(b)))
        if not base:
            return None, None
        ratios.append(other / base)
    return percentile(ratios, 2.5), percentile(ratios, 97.5)


def compared(a: RecordedRun, b: RecordedRun) -> str:
    """Return the comparison as lines for the terminal."""
    lines = [f"{'':22}{'A':>12}{'B':>12}{'B / A':>9}  95 % interval"]
    for figure in figures(a, b):
        cells = "".join(f"{value:12.2f}" if value is not None else f"{'-':>12}" for value in (figure.a, figure.b))
        ratio = f"{figure.ratio:9.2f}" if figure.ratio is not None else f"{'-':>9}"
        lines.append(f"{figure.name:22}{cells}{ratio}  {_range(figure)}".rstrip())
    return "\n".join([*lines, *_remarks(a, b)])


def compared_page(a: RecordedRun, b: RecordedRun) -> str:
    """Return the comparison as one self-contained HTML page."""
    rows = "".join(
        f"<tr><td>{figure.name}</td><td>{_cell(figure.a)}</td><td>{_cell(figure.b)}</td><td>{_cell(figure.ratio)}</td>"
        f"<td>{_range(figure)}</td></tr>"
        for figure in figures(a, b)
    )
    plots = "".join(
        f"<section><h2>{title}</h2>{plot.distribution({'A': a.latencies(column), 'B': b.latencies(column)}, 'ms', {})}</section>"
        for title, column in (("Time to first token", "ttft_s"), ("Time per output token", "tpot_s"))
    )
    sides = "".join(
        f"<p><b>{name}</b> {html.escape('; '.join(str(run.summary.get(key, '')) for key in _FACTS))}</p>"
        for name, run in (("A", a), ("B", b))
    )
    remarks = "".join(f'<p class="bound invalid">{html.escape(remark)}</p>' for remark in _remarks(a, b))
    head = "<tr><th></th><th>A</th><th>B</th><th>B / A</th><th>95 % interval of B / A</th></tr>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Baton bench: A and B</title><style>{STYLE}</style>'
        f"<h1>Baton bench: two runs</h1>{sides}{remarks}<table>{head}{rows}</table>"
        f'<div class="grid">{plots}</div></html>\n'
    )


_FACTS = ("workload", "target", "date", "model", "shape", "host", "versions")


def _remarks(a: RecordedRun, b: RecordedRun) -> list[str]:
    remarks = [
        f"{name} is not valid: its requests were sent late, or it was interrupted"
        for name, run in (("A", a), ("B", b))
        if not run.summary["valid"]
    ]
    remarks += [
        f"different {what}: {a.summary.get(key)} | {b.summary.get(key)}"
        for key, what in (("workload", "workloads"), ("host", "hosts"))
        if a.summary.get(key) != b.summary.get(key)
    ]
    return remarks


def _range(figure: Figure) -> str:
    return "" if figure.low is None else f"{figure.low:.2f} to {figure.high:.2f}  {figure.verdict}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
