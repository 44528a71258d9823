"""`baton bench` as a user runs it: its files, its messages, and its refusals."""

import csv
import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from baton.cli.client import bench as bench_module
from baton.cli.main import main
from tests.support.gateway.fake_gateway import FakeGateway, serving_gateway
from tests.support.launch.commands import run_unread
from tests.support.pace import patience


@pytest.fixture(scope="module")
def target():
    with serving_gateway(FakeGateway(delay_s=0.002)) as target:
        yield target


def bench(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_bench_asks_the_named_one_of_several_models(tmp_path):
    stub = FakeGateway()
    with serving_gateway(stub) as target:
        out = tmp_path / "run"
        bench("--target", target, "--model", "code", "--closed", "2", "--num-requests", "4", "--out", str(out))
    assert set(stub.models) == {"code"} and json.loads((out / "summary.json").read_text())["model"].startswith("code, ")


def test_a_run_and_its_files(target, tmp_path, capsys):
    out = tmp_path / "run"
    status = bench("--target", target, "--rate", "50", "--num-requests", "20", "--slo", "ttft=10s", "--out", str(out))
    said = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert status == (0 if summary["valid"] else 1)
    assert summary["num_answered"] == 20 and summary["slo_met_share"] == 1.0 and summary["bound"]["sentence"] in said
    assert len(list(csv.DictReader((out / "requests.csv").open()))) == 20
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_is_kept_though_nobody_reads_what_is_said(target, tmp_path):
    """`PYTHONUNBUFFERED=1 baton bench --out DIR | head -1`, as in a container."""
    out = tmp_path / "run"
    arguments = ("--target", target, "--closed", "2", "--num-requests", "4", "--out", str(out))
    assert run_unread("bench", *arguments) == (0, "")
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "requests.csv", "summary.json"]
    compared = tmp_path / "compared"
    assert run_unread("bench", "--compare", str(out), str(out), "--out", str(compared)) == (0, "")
    assert (compared / "compare.html").exists()


def test_bench_replays_a_trace(target, tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 900, "output_length": 9, "hash_ids": [1, 2]}\n' * 6)
    bench("--target", target, "--trace", str(trace), "--length-scale", "0.25", "--out", str(tmp_path / "o"))
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["num_requests"] == 6 and summary["workload"].startswith("trace t.jsonl")


def test_a_sweep_ends_where_the_objective_is_missed(target, tmp_path):
    arguments = ("--slo", "ttft=1ms", "--num-requests", "8", "--output-tokens", "2", "--out", str(tmp_path / "s"))
    bench("--target", target, "--sweep", *arguments)
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert summary["highest_rate_within_slo"] is None and len(summary["sweep"]) == 1


def test_a_sweep_closes_in_on_the_highest_rate(target, tmp_path, monkeypatch, capsys):
    """A stack that takes 11 requests a second: doubled up to 16, then halved to within a tenth. No step finds the
    prompts of another, or of the warm-up, in the cache."""
    measure, run_jobs, seeds = bench_module._Bench._measure, bench_module.run_jobs, []

    def recorded(plan, *arguments):
        seeds.append(plan.seed)
        return run_jobs(plan, *arguments)

    def limited(self, jobs, name):
        summary, ran = measure(self, jobs[:2], name)
        return {**summary, "valid": True, "slo_met_share": float(float(name.split()[-2]) <= 11)}, ran

    monkeypatch.setattr(bench_module._Bench, "_measure", limited)
    monkeypatch.setattr(bench_module, "run_jobs", recorded)
    arguments = ("--slo", "ttft=10s", "--output-tokens", "2", "--out", str(tmp_path / "s"))
    assert bench("--target", target, "--sweep", "--seed", "5", *arguments) == 0
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert [step["rate"] for step in summary["sweep"]] == [1, 2, 4, 8, 10, 11, 12, 16]
    assert summary["highest_rate_within_slo"] == 11 and summary["lowest_rate_beyond_slo"] == 12
    assert "highest rate within the SLO: 11/s; 12/s was not" in capsys.readouterr().out
    assert len(set(seeds)) == len(seeds) == 9


@pytest.fixture
def sweep(target, tmp_path, monkeypatch):
    """A sweep of steps whose outcomes `judged(rate)` says, as fields of the summary: its status, and its summary."""
    measure = bench_module._Bench._measure

    def run(judged):
        def measured(self, jobs, name):
            summary, ran = measure(self, [dataclasses.replace(job, at_s=0.0) for job in jobs[:2]], name)
            summary |= {"valid": True, "slo_met_share": 1.0, **judged(float(name.split()[-2]))}
            return summary, dataclasses.replace(ran, is_interrupted=summary["interrupted"])

        monkeypatch.setattr(bench_module._Bench, "_measure", measured)
        out = tmp_path / "s"
        status = bench("--target", target, "--sweep", "--slo", "ttft=10s", "--output-tokens", "2", "--out", str(out))
        return status, json.loads((out / "summary.json").read_text())

    return run


@pytest.mark.parametrize(
    "judged, rates, why",
    [
        (lambda rate: {"interrupted": rate == 4, "valid": rate != 4}, [1, 2, 4], "it was interrupted at 4/s"),
        (
            lambda rate: {"valid": rate <= 2, "send_lag_p99_s": 0.5},
            [1, 2, 2.125, 2.25, 2.5, 3, 4],
            "at 2.12/s requests were sent 500 ms late at p99",
        ),
    ],
    ids=["interrupted", "late"],
)
def test_a_sweep_that_did_not_find_the_rate_beyond_says_so(sweep, judged, rates, why, tmp_path, capsys):
    """A step that is not valid says nothing of the SLO."""
    status, summary = sweep(judged)
    assert [step["rate"] for step in summary["sweep"]] == rates
    assert status == 1 and not summary["valid"]
    assert summary["highest_rate_within_slo"] == 2 and summary["lowest_rate_beyond_slo"] is None
    told = capsys.readouterr().out
    assert "highest rate within the SLO: at least 2/s\n" in told and "was not" not in told
    words = f"The search did not end: {why}."
    assert words in told and words in (tmp_path / "s" / "report.html").read_text()


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_sweep_without_a_valid_step_knows_no_rate(sweep, interrupted, capsys):
    status, summary = sweep(lambda rate: {"valid": False, "interrupted": interrupted})
    assert status == 1 and len(summary["sweep"]) == 1
    assert summary["highest_rate_within_slo"] is None and summary["lowest_rate_beyond_slo"] is None
    assert "highest rate within the SLO: not known\n" in capsys.readouterr().out


def test_a_sweep_goes_on_below_a_step_that_is_not_valid(sweep, capsys):
    status, summary = sweep(lambda rate: {"valid": rate != 4, "slo_met_share": float(rate < 3)})
    assert [step["rate"] for step in summary["sweep"]] == [1, 2, 2.5, 2.75, 3, 4]
    assert status == 0 and summary["valid"]
    assert "highest rate within the SLO: 2.75/s; 3/s was not" in capsys.readouterr().out


def test_two_runs_are_compared(target, tmp_path, capsys):
    for name in ("a", "b"):
        bench("--target", target, "--closed", "4", "--num-requests", "8", "--out", str(tmp_path / name))
    capsys.readouterr()
    assert bench("--compare", str(tmp_path / "a"), str(tmp_path / "b")) == 0
    assert "TTFT p50, ms" in capsys.readouterr().out
    out = ("--out", str(tmp_path / "both"))
    assert bench("--compare", str(tmp_path / "a"), str(tmp_path / "b"), *out) == 0
    assert capsys.readouterr().out.endswith("both/compare.html\n")
    assert (tmp_path / "both" / "compare.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_progress_on_a_terminal_has_medians(target, num_processes):
    """A terminal of its own; the last line is of the whole run."""
    argv = [sys.executable, "-m", "baton.cli", "bench", "--target", target, "--closed", "2", "--num-requests", "12"]
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 120))
    with os.fdopen(screen, "rb", buffering=0) as shown:
        done = subprocess.run(
            [*argv, "--processes", num_processes], stdout=subprocess.DEVNULL, stderr=terminal, timeout=patience(60)
        )
        os.close(terminal)
        said = shown.read(1 << 16).decode()
    assert done.returncode == 0
    assert re.search(r"12/12 .*TTFT p50 \d+\.\d ms, TPOT p50 \d+\.\d ms", said), said


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--sweep",), "--sweep needs --slo"),
        (("--trace", "nowhere.csv"), "nowhere.csv"),
        (("--compare", "a", "b"), "a/summary.json"),
        (("--out", "."), "exists"),
        (
            ("--workload", "agent", "--prompt-tokens", "1024"),
            "--prompt-tokens 1024: the first 1,024 of a prompt of --workload agent",
        ),
        (("--rate-scale", "2"), "--rate-scale has no effect without --trace"),
        (("--closed", "2", "--length-scale", "2"), "--length-scale has no effect without --trace"),
        (("--closed", "2", "--arrivals", "burst"), "--arrivals has no effect beside --closed"),
        (("--trace", "t.csv", "--arrivals", "poisson"), "--arrivals has no effect beside --trace"),
        (("--trace", "t.csv", "--workload", "short"), "--workload has no effect beside --trace"),
        (("--trace", "t.csv", "--prompt-tokens", "9"), "--prompt-tokens has no effect beside --trace"),
        (("--trace", "t.csv", "--output-tokens", "9"), "--output-tokens has no effect beside --trace"),
    ],
)
def test_wrong_options_exit_2_and_are_named(arguments, named, capsys):
    assert bench("--target", "127.0.0.1:9", *arguments) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--slo", "fast"), ("--rate", "0"), ("--rate", "inf"), ("--rate-scale", "nan"), ("--closed", "-1"),
        ("--processes", "x"),
    ],
)  # fmt: skip
def test_values_that_are_none(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        bench(*arguments)
    assert caught.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_an_unreachable_gateway_is_one_line(capsys, tmp_path):
    assert bench("--target", "127.0.0.1:9", "--out", str(tmp_path / "o")) == 1
    assert "nothing listens at 127.0.0.1:9" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
