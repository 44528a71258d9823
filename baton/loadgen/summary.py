"""Summarize the outcomes of a run."""

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence

from baton.loadgen.bottleneck import name_bottleneck
from baton.loadgen.outcome import Outcome
from baton.loadgen.run import Ran
from baton.service.observe.phases import PHASES
from baton.service.slo import Slo

LARGEST_LAG_S = 0.005  # p99 of sent - intended; above it, the load was not the one that was asked for
COLUMNS = (
    "index", "intended_s", "sent_s", "first_s", "last_s", "num_prompt", "num_output", "num_cached", "num_messages",
    "longest_gap_s", "ttft_s", "tpot_s", "e2e_s", "status", "reason",
)  # fmt: skip


def summarize(ran: Ran, slo: Slo, is_open: bool) -> dict:
    """Return the figures of a run as plain values for JSON. Percentiles are over answered requests; goodput counts
    those within the SLO."""
    outcomes = ran.outcomes
    answered = [outcome for outcome in outcomes if outcome.ok]
    good = [outcome for outcome in answered if slo.met(outcome.ttft_s, outcome.tpot_s, outcome.e2e_s)]
    duration_s = max(ran.duration_s, 1e-9)
    lag_p99_s = percentile([outcome.lag_s for outcome in outcomes], 99)
    lags = is_open and lag_p99_s > LARGEST_LAG_S
    return {
        "num_requests": len(outcomes),
        "num_answered": len(answered),
        "statuses": dict(Counter(outcome.status for outcome in outcomes)),
        "duration_s": ran.duration_s,
        "requests_per_s": len(answered) / duration_s,
        "output_tokens_per_s": sum(outcome.num_output for outcome in answered) / duration_s,
        "input_tokens_per_s": sum(outcome.num_prompt for outcome in answered) / duration_s,
        "cached_share": _share(sum(o.num_cached for o in answered), sum(o.num_prompt for o in answered)),
        "slo": str(slo),
        "goodput_per_s": len(good) / duration_s,
        "slo_met_share": _share(len(good), len(outcomes)),
        "ttft_s": percentiles([outcome.ttft_s for outcome in answered]),
        "tpot_s": percentiles([outcome.tpot_s for outcome in answered if outcome.tpot_s is not None]),
        "e2e_s": percentiles([outcome.e2e_s for outcome in answered]),
        "longest_gap_s": percentiles([outcome.longest_gap_s for outcome in answered if outcome.num_messages > 1]),
        "phases_s": {
            **{phase: _mean([outcome.phases_s.get(phase, 0.0) for outcome in answered]) for phase in PHASES},
            "decode": _mean([outcome.decode_s for outcome in answered if outcome.phases_s]),
        },
        "send_lag_p99_s": lag_p99_s,
        "sender_cpu_share": ran.cpu_share,
        "interrupted": ran.is_interrupted,
        "valid": not lags and not ran.is_interrupted,
        "bound": name_bottleneck(answered, ran.cpu_share, lag_p99_s if lags else 0.0)._asdict(),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between ranks; nan for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, p50, p95, p99 and max; each None for no values."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    points = {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
    return {"mean": _mean(values), **points, "max": max(values)}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return requests.csv: a line per request, with its phases after the other columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    phases = (*PHASES, "transfer")
    writer.writerow([*COLUMNS, *(f"{phase}_s" for phase in phases)])
    for outcome in outcomes:
        cells = [getattr(outcome, column) for column in COLUMNS] + [outcome.phases_s.get(phase) for phase in phases]
        writer.writerow(f"{cell:.6f}" if isinstance(cell, float) else "" if cell is None else cell for cell in cells)
    return text.getvalue()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
