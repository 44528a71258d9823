"""The table of cases: what was promised, the outcome, and figures. Times are shown, never judged."""

from collections.abc import Iterator, Sequence

_FIXED = ("case", "promise", "outcome", "requests")


def lines(rows: Sequence[dict]) -> Iterator[str]:
    head = ("case", "promise", "outcome", "requests", "figures")
    cells = [head, *map(_cells, sorted(rows, key=lambda row: row["case"]))]
    widths = [min(64, max(len(row[column]) for row in cells)) for column in range(len(head) - 1)]
    for row in cells:
        yield "  ".join(
            [*(text[:width].ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()


def _cells(row: dict) -> tuple[str, ...]:
    requests = " ".join(f"{count} {status}" for status, count in row["requests"].items())
    figures = " ".join(f"{name}={value}" for name, value in row.items() if name not in _FIXED)
    return row["case"], row["promise"], row["outcome"], requests, figures
