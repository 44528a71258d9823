"""A worker of several ranks, one of which is lost: the worker ends with the reason, and leaves no process behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from baton.engine import native
from tests.support.models import make_model
from tests.support.pace import patience
from tests.support.process import children

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
OPTIONS = ("--num-blocks", "64", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + patience(10)
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


TENSOR, PIPELINE = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")
GRID = (*TENSOR, *PIPELINE)  # the last rank is of the second stage, and not its first
KILLED, STOPPED = (signal.SIGKILL, "was killed by signal 9"), (signal.SIGSTOP, "stands still for 1.5 s")
DRAINED = (signal.SIGTERM, None)


@pytest.mark.parametrize(
    ("how", "reason", "degree"),
    [
        (*KILLED, TENSOR),
        (*STOPPED, PIPELINE),
        (*DRAINED, TENSOR),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (*KILLED, PIPELINE),
                (*STOPPED, TENSOR),
                (*DRAINED, PIPELINE),
                (*KILLED, GRID),
                (*STOPPED, GRID),
            )
        ),
    ],
    ids=str,
)
def test_a_worker_and_its_ranks_end_together(fork_server, model, tmp_path, degree, how, reason):
    """SIGTERM is for the worker, which drains."""
    program = [sys.executable, "-m", "decode_worker", "--model", str(model), *OPTIONS, *degree]
    worker = fork_server.process("worker", program, tmp_path)
    try:
        worker.ready()
        ranks = children(worker.pid)
        rank = ranks[-1]
        os.kill(rank if reason else worker.pid, how)
        assert worker.wait() == (1 if reason else 0), worker.tail()
        assert all(map(is_gone, ranks))
        if reason:
            assert f"rank {len(ranks)} (pid {rank}) {reason}, so this worker ends with all its ranks" in worker.text()
    finally:
        worker.popen.kill()
        worker.wait()


@pytest.mark.parametrize(
    "degree", [TENSOR, pytest.param(PIPELINE, marks=pytest.mark.long)], ids=lambda degree: degree[0]
)
def test_ranks_end_with_a_worker_that_is_killed(fork_server, model, tmp_path, degree):
    program = [sys.executable, "-m", "decode_worker", "--model", str(model), *OPTIONS, *degree]
    worker = fork_server.process("worker", program, tmp_path)
    try:
        worker.ready()
        ranks = children(worker.pid)
    finally:
        worker.popen.kill()
        worker.wait()
    assert all(map(is_gone, ranks))
