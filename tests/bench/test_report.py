"""Reports of benches: goals judged, arms interleaved, nothing in the file that names the machine it ran on."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.core import cpu
from baton.engine.native.tier import TIERS
from bench.lib import report
from tests.support.process import ROOT


@pytest.mark.parametrize(
    "value, against, goal, ratio, met",
    [
        (80, 100, "ratio >= 0.80", 0.8, True),
        (79, 100, "ratio >= 0.80", 0.79, False),
        (119, None, "value < 120", None, True),
        (120, None, "value < 120", None, False),
        (0, None, "value <= 0", None, True),
        (5, 4, "", 1.25, None),
        (4, 4, "ratio > 1", 1.0, False),
    ],
)
def test_a_row_has_its_ratio_and_whether_it_meets_its_goal(value, against, goal, ratio, met):
    row = report.Report("python bench/x.py", True).add("row", value, "s", against=against, goal=goal)
    assert (row.ratio, row.met) == (ratio, met)


def test_a_goal_with_an_unknown_sign_is_named():
    with pytest.raises(ValueError, match=r"goal 'value => 1': '=>' is none of >= <= < >"):
        report.Report("python bench/x.py", True).add("row", 1, "s", goal="value => 1")


@pytest.mark.parametrize(
    "value, limit, known", [(1.0, 2.0, 2.0), (2.05, 2.0, 2.0), (2.2, 2.0, None), (1.0, None, None)]
)
def test_a_limit_that_a_row_exceeds_is_none(value, limit, known):
    made = report.Report("python bench/x.py", True)
    made.add("row", value, "s")
    made.bound("row", limit, 1.05)
    assert made.rows[0].limit == known


def test_arms_take_turns():
    order = []
    arms = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    values = report.interleave(arms, 3)
    assert "".join(order) == "abccbaabc"
    assert values == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert report.medians(values) == {"a": 6, "b": 5, "c": 4}


def test_the_file_names_no_host_and_no_path(tmp_path):
    made = report.Report("python bench/x.py --quick", True)
    made.add("row", 1.0, "s", against=2.0, limit=0.5, goal="ratio <= 1")
    path = tmp_path / "report.json"
    made.write(path)
    text = path.read_text()
    written = json.loads(text)
    assert set(written) == {"command", "date", "quick", "machine", "versions", "rows"}
    figures = {"value": 1.0, "unit": "s", "against": 2.0, "limit": 0.5, "ratio": 0.5}
    assert written["rows"] == [{"row": "row", **figures, "goal": "ratio <= 1", "met": True}]
    assert socket.gethostname() not in text and str(ROOT) not in text and str(Path.home()) not in text


def run_program(program: str, path: Path) -> tuple[subprocess.CompletedProcess, dict]:
    """Run a bench that writes its report to `path`, and read it."""
    argv = [sys.executable, "-c", program, "--json", str(path)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True), json.loads(path.read_text())


def test_a_bench_that_breaks_ends_with_its_rows(tmp_path):
    """And with the reason in one line, and exit status 1."""
    program = (
        "from bench.lib.report import start\n"
        "arguments, report = start('x', '')\n"
        "report.add('measured', 1.0, 's')\n"
        "raise RuntimeError('the machine is\\nbusy')\n"
    )
    done, written = run_program(program, tmp_path / "report.json")
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.splitlines()[-1] == "ended early at <string>:4, 1 rows: RuntimeError: the machine is busy"
    assert written["failed"] == "RuntimeError: the machine is busy" and written["rows"][0]["row"] == "measured"


def test_requests_that_failed_end_a_bench_with_its_rows(tmp_path):
    """What ends by sys.exit with words is not asked why: rows of half an hour were lost."""
    program = (
        "import json, subprocess, sys\n"
        "from bench.gateway import seen\n"
        "from bench.lib.report import start\n"
        "arguments, report = start('x', '')\n"
        "report.add('measured', 1.0, 's')\n"
        "says = f'print({json.dumps(dict(failed=[\"UNAVAILABLE: x\"]))!r})'\n"
        "seen(subprocess.Popen([sys.executable, '-c', says], stdout=subprocess.PIPE, text=True))\n"
    )
    done, written = run_program(program, tmp_path / "report.json")
    assert done.returncode == 1, done.stderr
    assert "1 requests failed, the first with UNAVAILABLE: x" in written["failed"]
    assert written["rows"][0]["row"] == "measured"


# Processes of their own, and what ends before there is a report.
ENDS_BY_ITSELF = {"lib/as_module.py", "arms/llama_cpp_peer.py"}


def test_no_bench_ends_by_words_that_no_report_has():
    """sys.exit("...") writes no file: an exception does, see report.start."""
    said = re.compile(r"(sys\.exit|raise SystemExit)\((?!main\(\)\))")
    found = [
        f"{path}: {line.strip()}"
        for path in sorted((ROOT / "bench").rglob("*.py"))
        if (name := path.relative_to(ROOT / "bench").as_posix()) not in ENDS_BY_ITSELF and "processes/" not in name
        for line in path.read_text().splitlines()
        if said.search(line) and "give --json another file" not in line
    ]
    assert not found


def test_parts_of_a_bench_meet_in_one_file(tmp_path):
    """What a later run measures again takes the place of the earlier rows; another machine's file is not mixed in."""
    program = (
        "from bench.lib.report import finish, start\n"
        "arguments, report = start('x', '', ('one', 'two'))\n"
        "for part in arguments.only:\n"
        "    report.add(part, 1.0, 's')\n"
        "report.add('rows', len(report.all_rows), 'rows')\n"
        "finish(arguments, report)\n"
    )
    path = tmp_path / "report.json"

    def run(*only: str) -> subprocess.CompletedProcess:
        argv = [sys.executable, "-c", program, "--json", str(path), "--only", *only]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)

    for part in ("one", "two", "two"):
        assert run(part).returncode == 0
    written = json.loads(path.read_text())
    assert written["command"] == "python bench/x.py --only one; python bench/x.py --only two"
    assert [(row["row"], row["value"]) for row in written["rows"]] == [("one", 1.0), ("two", 1.0), ("rows", 3)]
    path.write_text(json.dumps(written | {"machine": written["machine"] | {"cores": 1000}}))
    other = run("one")
    assert other.returncode == 1 and other.stderr.splitlines()[-1].endswith("give --json another file")


def test_the_processor_is_recorded():
    found = report.machine()
    assert found["cpu"] == cpu.name() and found["tier"] in ("none", *(tier.name for tier in TIERS))


def test_a_nearest_rank_is_a_measured_value():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [report.nearest_rank(values, percent) for percent in (0, 25, 26, 50, 99, 100)] == [1, 1, 2, 2, 4, 4]
    assert report.nearest_rank(range(1, 101), 99) == 99 and report.nearest_rank(range(1, 1001), 95) == 950


def test_options_of_a_bench_are_in_its_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", "--help"])
    with pytest.raises(SystemExit):
        report.start("x", "", options={"--trace": dict(metavar="FILE", help="replay this trace")})
    assert re.search(r"--trace FILE +replay this trace", capsys.readouterr().out)


def test_percentiles_of_few():
    assert report.percentile_ms([0.002], 99) == report.percentile_ms([0.002], 50) == 2.0
    assert report.percentile_ms([0.001, 0.003], 50) == 2.0
    assert report.percentile_ms([0.001, 0.002], 99) <= 2.0, "no value is larger"
    assert report.percentile_ms([i / 1000 for i in range(1, 21)], 99) == pytest.approx(19.81)
    with pytest.raises(ValueError, match="nothing came"):
        report.percentile_ms([], 50)
