"""What .ci/run says at its end: the count, and which tests were flaky in which run."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.process import ROOT

spec = importlib.util.spec_from_file_location("ci_results", ROOT / ".ci" / "results.py")
ci_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ci_results)


def write_junit(path: Path, **outcomes: str) -> None:
    kinds = {"failed": "<failure/>", "error": "<error/>", "skipped": "<skipped/>", "passed": ""}
    cases = "".join(
        f'<testcase classname="tests.a" name="{name}">{kinds[what]}</testcase>' for name, what in outcomes.items()
    )
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")


def test_a_test_that_passes_when_run_again_is_flaky_and_one_that_fails_twice_has_failed(tmp_path, capsys):
    noted = tmp_path / "flaky.jsonl"
    write_junit(tmp_path / "first.xml", one="passed", two="failed", three="error", four="skipped")
    write_junit(tmp_path / "again.xml", two="passed", three="failed")
    ci_results.main(tmp_path, noted)
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 1 failed, 1 skipped"
    assert json.loads(noted.read_text())["flaky"] == ["tests.a::two"]


def test_runs_add_up(tmp_path):
    noted = tmp_path / "flaky.jsonl"
    ci_results.note_run(noted, 3999, [])
    assert "1 of 4,000 tests (within 1 in 2,000)" in ci_results.note_run(noted, 1, ["a"])
    assert "BEYOND" in ci_results.note_run(noted, 1, ["a", "b"])


def test_a_run_without_results_says_so(tmp_path):
    with pytest.raises(SystemExit, match="no test results"):
        ci_results.main(tmp_path, tmp_path / "flaky.jsonl")
