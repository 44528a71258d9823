"""`baton bench` that does not get to its end, and inputs that are none: one line, and never half a result."""

import gzip
import json
import signal
import sys
import time

import psutil
import pytest

from baton.cli.main import main
from baton.loadgen import report
from tests.support.gateway.fake_gateway import FakeGateway, serving_gateway
from tests.support.pace import patience
from tests.support.process import Process


@pytest.fixture(scope="module")
def stub():
    return FakeGateway(delay_s=0.05)


@pytest.fixture(scope="module")
def target(stub):
    with serving_gateway(stub) as target:
        yield target


def started(stub: FakeGateway, target: str, folder, *options: str) -> Process:
    """A run of minutes, on its way."""
    num_before = len(stub.prompts)
    argv = [
        sys.executable,
        "-m",
        "baton.cli.main",
        "bench",
        "--target",
        target,
        "--rate",
        "20",
        "--num-requests",
        "5000",
    ]
    process = Process("bench", [*argv, "--out", str(folder / "run"), *options], folder)
    deadline = time.monotonic() + patience(60)
    while len(stub.prompts) < num_before + 20:  # some beyond the warm-up have ended
        assert process.alive and time.monotonic() < deadline, process.text()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_no_result(stub, target, tmp_path, number):
    process = started(stub, target, tmp_path)
    process.popen.send_signal(number)
    process.wait()
    assert not (tmp_path / "run").exists() and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_an_interrupted_run_writes_what_it_has(stub, target, tmp_path, num_processes):
    process = started(stub, target, tmp_path, "--processes", num_processes)
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 1 and "Traceback" not in process.text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] and not summary["valid"] and 1 <= summary["num_answered"] < 5000
    told = f"Interrupted: these are the {summary['num_requests']} requests that had ended."
    assert told in process.text() and told in (tmp_path / "run" / "report.html").read_text()
    assert not list(tmp_path.glob(".run*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sender_process_that_dies_ends_the_run(stub, target, tmp_path, number):
    """In one line. The requests that it had would never come."""
    process = started(stub, target, tmp_path, "--processes", "2")
    senders = [
        each for each in psutil.Process(process.pid).children() if "--multiprocessing-fork" in " ".join(each.cmdline())
    ]
    assert len(senders) == 2
    senders[-1].send_signal(number)
    assert process.wait() == 1
    told = process.text().splitlines()[-1]
    assert f"baton bench: a sender process was ended by {number.name}" in told and "Traceback" not in process.text()
    assert not list(tmp_path.glob("*run*"))
    assert not psutil.wait_procs(senders, patience(20))[1]


def test_a_report_that_cannot_be_made_leaves_no_result(target, tmp_path, monkeypatch):
    def crash(*args):
        raise RuntimeError("in the middle of it")

    monkeypatch.setattr(report, "page", crash)
    with pytest.raises(RuntimeError):
        main(["bench", "--target", target, "--closed", "4", "--num-requests", "4", "--out", str(tmp_path / "run")])
    assert not list(tmp_path.iterdir())


def test_a_place_where_nothing_can_be_written_costs_no_run(target, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "--target", target, "--out", str(tmp_path / "file" / "run")]) == 1
    error = capsys.readouterr().err
    assert "Not a directory" in error and error.count("\n") == 1


TRACES = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n",
    "list.jsonl": b"[1, 2]\n",
    "cut.jsonl": b'{"timestamp": 0, "input_len',
    "nothing.jsonl": b'{"timestamp": 0, "input_length": 0, "output_length": 1}\n',
    "never.jsonl": b'{"timestamp": NaN, "input_length": 8, "output_length": 1}\n',
    "endless.jsonl": b'{"timestamp": 0, "input_length": Infinity, "output_length": 1}\n',
    "bytes.jsonl": b"\xff\xfe\x00",
    "header.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "columns.csv": b"a,b,c\n1,2,3\n",
    "short.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00\n",
    "wide.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"x" * 200_000,
    "cut.csv.gz": gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n" * 100)[:40],
    "spoilt.jsonl.gz": gzip.compress(b"{}" * 1000)[:12] + b"\xff" * 30,
    "plain.jsonl.gz": b"not packed",
    "trace.parquet": b"PAR1",
}


@pytest.mark.parametrize("name", TRACES)
def test_traces_that_are_none(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(TRACES[name])
    assert main(["bench", "--target", "127.0.0.1:9", "--trace", str(path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_for_a_trace(tmp_path, capsys):
    (tmp_path / "t.csv").mkdir()
    assert main(["bench", "--target", "127.0.0.1:9", "--trace", str(tmp_path / "t.csv")]) == 2
    assert "Is a directory" in capsys.readouterr().err
