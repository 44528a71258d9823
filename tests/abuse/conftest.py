"""The table at the end: ports x abuses, how much longer the bystander took at worst than alone, what memory stayed."""

import json

import pytest

from tests.support.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    told = [
        json.loads(value)
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "abuse"
    ]
    if told:
        terminalreporter.section("abuse: the bystander's worst time over its time alone, and MiB that stayed")
        for line in table(told):
            terminalreporter.write_line(line)


def table(told: list[dict]) -> list[str]:
    """A line an abuse, a column a port; of several callers the worst."""
    ports, abuses = (list(dict.fromkeys(row[name] for row in told)) for name in ("port", "abuse"))

    def cell(abuse: str, port: str) -> str:
        rows = [row for row in told if (row["abuse"], row["port"]) == (abuse, port)]
        return f"{max(row['ratio'] for row in rows):.1f}x {max(row['mib'] for row in rows):+.0f}" if rows else "-"

    lines = [["", *ports], *([abuse, *(cell(abuse, port) for port in ports)] for abuse in abuses)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
