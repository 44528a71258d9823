"""docs/benchmarks.md is what the recorded runs say."""

import json

import pytest

from bench import pages
from tests.support.process import ROOT


def test_the_page_is_fresh():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == pages.page()


@pytest.fixture
def results(tmp_path, monkeypatch):
    def write(name: str, date: str, *rows: dict) -> None:
        report = {"command": "c", "date": date, "machine": {"cpu": "some CPU", "cores": 2}, "versions": {"torch": "2"}}
        (tmp_path / f"{name}-{date}.json").write_text(json.dumps({**report, "rows": rows}))

    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    return write


def row(name: str, value: float, against: float | None = None, goal: str = "", met: bool | None = None) -> dict:
    ratio = value / against if against else None
    numbers = {"value": value, "unit": "ms", "against": against, "limit": None, "ratio": ratio}
    return {"row": name, **numbers, "goal": goal, "met": met}


def test_the_newest_full_run_is_shown(results):
    results("x-cpu", "2026-01-02", row("old", 1))
    results("x-cpu", "2026-01-03", row("new", 1234.5, 2000.0, "ratio >= 0.8", False), row("more", 0.12345))
    results("x-cpu-quick", "2026-01-04", row("quick", 1))
    page = pages.page()
    assert "old" not in page and "## x\n" in page and "0 of 1 goals met" in page
    assert "| new | 1,234 ms | 2,000 |  | 0.617 | ratio >= 0.8 | **no** |" in page
    assert "| more | 0.123 ms |  |  |  |  |  |" in page and "| quick |" not in page


def test_a_run_without_goals_says_so(results):
    results("x-cpu", "2026-01-03", row("measured", 1))
    page = pages.page()
    assert ": no goals. [" in page and "0 of 0" not in page


def test_points_of_a_plan_are_a_table(results):
    rows = [row(f"small, 1:1: {what}, planned over measured", 9.0, 10.0) for what in ("TTFT", "TPOT")]
    results("plan-cpu", "2026-01-03", *rows)
    assert "| small, 1:1 | 9 | 10 | -10 % | 9 | 10 | -10 % |" in pages.page()


def test_of_a_long_run_the_rows_with_a_goal_are_shown(results):
    rows = [row(f"plain {i}", i) for i in range(50)]
    results("x-cpu", "2026-01-03", *rows, row("judged", 1, goal="value < 2", met=True), row("all: A/A", 1, 1.0))
    page = pages.page()
    assert "plain" not in page and "| judged |" in page and "| all: A/A |" in page and "has 52 rows" in page
