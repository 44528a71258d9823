"""Time limits of tests are as long as the machine is slow, never shorter than they are written, nothing outlasts
them, and a process that a worker ends says why."""

import pytest

from tests.runner.inner_pytest import run_pytest
from tests.support import pace


@pytest.mark.parametrize("measured_s, factor", [(0.01, 1.0), (0.05, 1.0), (0.1, 2.0), (0.3, 6.0), (60.0, 8.0)])
def test_a_slow_machine_is_waited_for(measured_s, factor):
    assert pace.of(measured_s) == pytest.approx(factor)


def test_the_pace_is_measured_once(monkeypatch):
    taken = iter([0.1, 0.15, 9.0])
    monkeypatch.delenv(pace.VARIABLE, raising=False)
    monkeypatch.setattr(pace, "_once", lambda: next(taken))
    assert pace.patience(10.0) == pytest.approx(30.0) and pace.slowness() == pytest.approx(3.0)


def test_a_test_may_take_as_much_longer(request):
    (limit,) = request.node.get_closest_marker("timeout").args
    assert limit == pytest.approx(float(request.config.getini("timeout")) * pace.slowness())


@pytest.mark.timeout(50)
def test_so_does_one_with_a_limit_of_its_own(request):
    assert request.node.get_closest_marker("timeout").args[0] == pytest.approx(50 * pace.slowness())


WAITS_FOR_EVER = """
import ctypes, threading, pytest

@pytest.fixture
def unending():
    yield
    lock = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)  # in native code, where no signal is seen to

@pytest.mark.timeout(0.2)
def test_stuck(unending):
    threading.Event().wait()

def test_well():
    pass
"""


def test_what_no_limit_ends_is_named_and_the_others_run(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests import conftest\nconftest.GRACE_S = 3\n")
    ran = run_pytest(tmp_path, {"test_file.py": WAITS_FOR_EVER}, "-n1", "--timeout=60")
    assert ran.returncode == 1 and "2 failed, 1 passed" in ran.stdout  # test_stuck, and its worker
    assert "crashed while running 'test_file.py::test_stuck'" in ran.stdout
    assert "in unending" in ran.stderr


ENDS = """
from baton.service.fatal import exit_for_lost_rank

def test_lost():
    exit_for_lost_rank("rank 1 stands still")
"""


def test_a_worker_that_ends_its_process_says_why(tmp_path):
    ran = run_pytest(tmp_path, {"test_file.py": ENDS}, "-n1", "--timeout=60")
    assert "crashed while running 'test_file.py::test_lost'" in ran.stdout
    assert "rank 1 stands still, so this worker ends with all its ranks" in ran.stderr
