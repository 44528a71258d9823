"""report.html: one self-contained page."""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from baton.loadgen import plot
from baton.loadgen.outcome import Outcome
from baton.service.observe.phases import COLORS
from baton.service.slo import Slo, parse_slo

_NUM_PARTS = 30  # of a run, on a timeline
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1020px;color:#111827;background:#fff}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:22px 0 6px}
.bound{background:#eff6ff;border-left:4px solid #2563eb;padding:10px 14px;margin:14px 0;font-size:15px}
.invalid{background:#fef2f2;border-left-color:#dc2626}
.grid{display:grid;grid-template-columns:1fr 1fr;gap:18px}svg{width:100%;height:auto}svg text{font-size:10px;fill:#6b7280}
svg text.mark{fill:#dc2626}table{border-collapse:collapse}td,th{padding:3px 12px 3px 0;text-align:right}
td:first-child,th:first-child{text-align:left}.legend{font-size:12px;color:#374151}
.legend span{margin-right:12px;white-space:nowrap}.legend i{display:inline-block;width:10px;height:10px;margin-right:4px}
.nothing,.facts{color:#6b7280}
"""


def page(summary: Mapping, outcomes: Sequence[Outcome], sweep: Sequence[Mapping]) -> str:
    """Return the page. `sweep` has the summaries of all steps, including `summary`; empty without a sweep."""
    answered = [outcome for outcome in outcomes if outcome.ok]
    marks = dict(part.split("=") for part in summary["slo"].split(",") if part)
    bounds = {name: {f"SLO {value}": float(value.removesuffix("ms"))} for name, value in marks.items()}
    ttft_ms = [1e3 * outcome.ttft_s for outcome in answered]
    tpot_ms = [1e3 * outcome.tpot_s for outcome in answered if outcome.tpot_s is not None]
    arrivals = [(outcome.intended_s, 1e3 * outcome.ttft_s) for outcome in answered]
    plots = [
        ("Time to first token", plot.distribution({"TTFT": ttft_ms}, "ms", bounds.get("ttft", {}))),
        ("Time per output token", plot.distribution({"TPOT": tpot_ms}, "ms", bounds.get("tpot", {}))),
        ("Timeline: TTFT by intended arrival", plot.points({"answered": arrivals}, "arrival, s", "TTFT, ms")),
        ("Goodput by offered rate", _sweep(sweep))
        if sweep
        else ("Goodput over time", _goodput(outcomes, summary["slo"])),
    ]
    phases = {name: 1e3 * value for name, value in summary["phases_s"].items() if value}
    cells = "".join(f"<section><h2>{title}</h2>{svg}</section>" for title, svg in plots)
    void = "" if summary["valid"] else f'<p class="bound invalid">{html.escape(_void(summary))}</p>'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Baton bench</title><style>{STYLE}</style>'
        f"<h1>Baton bench: {html.escape(summary['workload'])}</h1>"
        f'{void}<p class="bound">{html.escape(summary["bound"]["sentence"])}</p>{_facts(summary)}'
        f"{_figures(summary)}<h2>Where the time goes, mean of the answered requests</h2>{plot.stack(phases, 'ms', COLORS)}"
        f'<div class="grid">{cells}</div></html>\n'
    )


def _facts(summary: Mapping) -> str:
    """Return what was measured: target, model, shape of the requests, host and versions."""
    facts = (
        summary["target"],
        summary["date"],
        summary["model"],
        summary["shape"],
        summary["host"],
        summary["versions"],
    )
    return f'<p class="facts">{html.escape("; ".join(facts))}</p>'


def verdict(summary: Mapping) -> str:
    """Return the sentence that names the bottleneck; if the run is not valid, the reason comes first."""
    return ("" if summary["valid"] else f"{_void(summary)} ") + summary["bound"]["sentence"]


def _void(summary: Mapping) -> str:
    if summary["interrupted"]:
        return f"Interrupted: these are the {summary['num_requests']} requests that had ended."
    if unfinished := summary.get("unfinished"):  # of a sweep
        return f"The search did not end: {unfinished}."
    return f"Not valid: {late(summary)}."


def late(summary: Mapping) -> str:
    """Return in words how late requests were sent."""
    return f"requests were sent {1e3 * summary['send_lag_p99_s']:.0f} ms late at p99"


def _figures(summary: Mapping) -> str:
    rows = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{_ms(summary[key][point])}</td>' for point in ('p50', 'p95', 'p99', 'max'))}</tr>"
        for name, key in (
            ("TTFT", "ttft_s"),
            ("TPOT", "tpot_s"),
            ("longest gap", "longest_gap_s"),
            ("end to end", "e2e_s"),
        )
    )
    slo = f", within {summary['slo']}: {summary['slo_met_share'] or 0:.1%}" if summary["slo"] else ""
    rates = (
        f"{summary['num_answered']} of {summary['num_requests']} answered{slo}; {summary['requests_per_s']:.2f} requests/s, "
        f"goodput {summary['goodput_per_s']:.2f}/s, {summary['output_tokens_per_s']:.0f} output tokens/s, "
        f"{summary['cached_share'] or 0:.0%} of the prompt tokens from cache"
    )
    head = "<tr><th>ms</th><th>p50</th><th>p95</th><th>p99</th><th>max</th></tr>"
    return f"<p>{html.escape(rates)}</p><table>{head}{rows}</table>"


def _goodput(outcomes: Sequence[Outcome], objective: str) -> str:
    """Return a plot of requests per second in thirty equal parts of the run."""
    width_s = max((outcome.last_s for outcome in outcomes), default=0.0) / _NUM_PARTS or 1.0
    answered, slo = [outcome for outcome in outcomes if outcome.ok], parse_slo(objective) if objective else Slo()
    good = [outcome for outcome in answered if slo.met(outcome.ttft_s, outcome.tpot_s, outcome.e2e_s)]

    def rates(at_s: Iterable[float]) -> list[tuple[float, float]]:
        counts = Counter(min(int(each / width_s), _NUM_PARTS - 1) for each in at_s)
        return [((part + 0.5) * width_s, counts[part] / width_s) for part in range(_NUM_PARTS)]

    series = {
        "offered": rates(outcome.intended_s for outcome in outcomes),
        "answered": rates(outcome.last_s for outcome in answered),
        "within the SLO": rates(outcome.last_s for outcome in good),
    }
    return plot.curves(series, "s", "requests/s")


def _sweep(sweep: Sequence[Mapping]) -> str:
    series = {
        "goodput": [(step["rate"], step["goodput_per_s"]) for step in sweep],
        "answered": [(step["rate"], step["requests_per_s"]) for step in sweep],
    }
    return plot.curves(series, "offered, requests/s", "requests/s")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.1f}"
