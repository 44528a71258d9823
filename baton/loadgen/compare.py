"""Compare two runs: each figure side by side, in one table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROWS = (
    ("requests/s", ("requests_per_s",), 1),
    ("goodput/s", ("goodput_per_s",), 1),
    ("output tokens/s", ("output_tokens_per_s",), 1),
    ("TTFT p50, ms", ("ttft_s", "p50"), 1e3),
    ("TTFT p99, ms", ("ttft_s", "p99"), 1e3),
    ("TPOT p50, ms", ("tpot_s", "p50"), 1e3),
    ("TPOT p99, ms", ("tpot_s", "p99"), 1e3),
    ("end to end p99, ms", ("e2e_s", "p99"), 1e3),
)


def read_summary(folder: Path) -> dict:
    """Raises ValueError naming the file that is none."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text())
        for key in (("requests_per_s",), ("ttft_s", "p50"), ("workload",)):
            _value(summary, key)
        return summary
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the summary of a run ({error})") from None


def compared(first: Mapping, second: Mapping) -> str:
    """Lines; the last column is second over first."""
    lines = [f"{'':22}{'A':>12}{'B':>12}{'B / A':>9}"]
    for name, path, factor in _ROWS:
        a, b = _value(first, path), _value(second, path)
        ratio = f"{b / a:9.2f}" if a and b is not None else f"{'-':>9}"
        lines.append(f"{name:22}{_cell(a, factor)}{_cell(b, factor)}{ratio}")
    for name, summary in (("A", first), ("B", second)):
        if not summary["valid"]:
            lines.append(f"{name} is not valid: its requests were sent late")
    if first["workload"] != second["workload"]:
        lines.append(f"different workloads: {first['workload']} | {second['workload']}")
    return "\n".join(lines)


def _value(summary: Mapping, path: tuple[str, ...]) -> float | None:
    value: Any = summary
    for name in path:
        value = value[name]
    return value


def _cell(value: float | None, factor: float) -> str:
    return f"{'-':>12}" if value is None else f"{factor * value:12.2f}"
