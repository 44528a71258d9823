"""`baton up` with stand-ins for gateway and workers, where what it says cannot be written: it serves, and drains as
ever."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch.stand_ins import make_stand_ins
from tests.support.pace import patience
from tests.support.process import ROOT

ALL = ["decode_worker", "gateway", "prefill_worker"]


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_stand_ins(tmp_path)


def start(folder: Path, stdout, stderr) -> subprocess.Popen:
    argv = [sys.executable, "-m", "baton.cli", "up", "--model", "m", "--listen", "127.0.0.1:0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=stdout, stderr=stderr, text=True)


def drained(process: subprocess.Popen, folder: Path) -> list[str]:
    """Which processes drained, once it has ended well."""
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(patience(30)) == 0
    finally:
        process.kill()
    return sorted((folder / "drained").read_text().split())


def test_a_cluster_whose_reader_has_gone_drains(folder):
    """As tee does, of the same Ctrl-C."""
    process = start(folder, subprocess.PIPE, subprocess.STDOUT)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("ready "):
        pass
    process.stdout.close()
    assert drained(process, folder) == ALL


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("which", "last"), [("stdout", "baton: page"), ("stderr", "ready ")])
def test_the_disk_is_full_from_the_start(folder, which, last):
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, which: full}
        process = start(folder, **streams)
    readable = process.stdout or process.stderr
    assert readable is not None
    while not (line := readable.readline()).startswith(last):
        assert line, "it has ended"
    assert drained(process, folder) == ALL
    readable.close()


def test_nobody_reads_what_a_child_logs(folder):
    process = start(folder, subprocess.PIPE, subprocess.STDOUT)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("ready "):
        pass
    (folder / "gateway.floods").touch()
    deadline = time.monotonic() + patience(30)
    while not (folder / "gateway.flooded").exists():
        assert time.monotonic() < deadline, "its log stops the child"
        time.sleep(0.01)
    assert drained(process, folder) == ALL
    process.stdout.close()
