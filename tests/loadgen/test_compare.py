"""Two runs side by side: ratios with intervals that hold the truth, remarks on what cannot be compared."""

import json
import random
import re

import pytest

from baton.loadgen.compare import RecordedRun, compared, compared_page, figures, read_run
from baton.loadgen.outcome import Outcome
from baton.loadgen.run import Ran
from baton.loadgen.summary import summarize, table
from baton.service.slo import Slo

DURATION_S = 40.0


def run(folder, ttft_s: float, seed: int = 1, num: int = 200, **facts) -> RecordedRun:
    """A run of latencies that vary by a third, as `baton bench --out` writes it."""
    rng = random.Random(seed)
    outcomes = []
    for index in range(num):
        at, ttft = DURATION_S * index / num, ttft_s * rng.uniform(0.67, 1.33)
        outcomes.append(Outcome(index, at, 64, at, at + ttft, at + ttft + 0.2, 11, 0, 11, 0.02))
    summary = summarize(Ran(outcomes, DURATION_S, 0.1), Slo(), is_open=True)
    facts = {"workload": "short", "host": "2 cores", "target": "<t>"} | facts
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({**facts, **summary}))
    (folder / "requests.csv").write_text(table(outcomes))
    return read_run(folder)


def by_name(a: RecordedRun, b: RecordedRun) -> dict:
    return {figure.name: figure for figure in figures(a, b)}


def test_a_difference_is_seen_and_its_interval_holds_it(tmp_path):
    found = by_name(run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.2, seed=2))["TTFT p50, ms"]
    assert found.low < 2.0 < found.high and found.low > 1.5 and found.verdict == "more"
    assert found.low < found.ratio < found.high


def test_runs_of_one_stack_show_no_difference(tmp_path):
    """Of 20 pairs drawn alike, an interval of 95 % holds 1 in nearly all."""
    runs = [run(tmp_path / str(seed), 0.1, seed, num=100) for seed in range(21)]
    verdicts = [by_name(a, b)["TTFT p50, ms"].verdict for a, b in zip(runs, runs[1:], strict=False)]
    assert verdicts.count("no difference seen") >= 15, verdicts


def test_half_the_rate_is_less(tmp_path):
    found = by_name(run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.1, num=100))["requests/s"]
    assert found.ratio == pytest.approx(0.5) and found.verdict == "less" and found.low <= 0.5 <= found.high


def test_the_lines_are_the_same_each_time(tmp_path):
    a, b = run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.2)
    (line,) = (line for line in compared(a, b).splitlines() if line.startswith("TTFT p50"))
    assert re.search(r"\d+\.\d\d +\d+\.\d\d +2\.00  \d\.\d\d to \d\.\d\d  more$", line)
    assert compared(a, b) == compared(a, b)


def test_what_cannot_be_compared_is_said(tmp_path):
    a = run(tmp_path / "a", 0.1)
    b = run(tmp_path / "b", 0.1, workload="long", host="64 cores")
    b.summary["valid"] = False
    for text in (compared(a, b), compared_page(a, b)):
        assert "B is not valid" in text and "A is not" not in text
        assert "different workloads: short | long" in text and "different hosts: 2 cores | 64 cores" in text


def test_the_page_needs_nothing_beside_it(tmp_path):
    text = compared_page(run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.2))
    assert not re.search(r"(src|href)=|<script|@import|url\(", text)
    assert text.count("<svg") == 2 and "&lt;t&gt;" in text and "2.00" in text


def test_a_run_of_which_nothing_was_answered(tmp_path):
    a, empty = run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.1, num=0)
    assert "TTFT" not in compared(a, empty) and "requests/s" in compared(empty, a)


@pytest.mark.parametrize("name, text", [("summary.json", "{}"), ("requests.csv", "a,b\n1,2\n"), ("requests.csv", None)])
def test_what_is_no_run_is_named(tmp_path, name, text):
    run(tmp_path / "a", 0.1)
    (tmp_path / "a" / name).unlink() if text is None else (tmp_path / "a" / name).write_text(text)
    with pytest.raises(ValueError, match=f"a/{name}: not of a run"):
        read_run(tmp_path / "a")
