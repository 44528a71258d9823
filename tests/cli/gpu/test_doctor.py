"""The runner of `baton doctor --gpu`: a row for whatever becomes of a step, one line without a GPU."""

import contextlib
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from baton.cli.gpu import doctor
from baton.cli.gpu.check import Check
from kvtransfer.memory.cuda_runtime import find_runtime

GOOD = "from baton.cli.gpu.check import Check; print('noise'); print(Check('a', 'memory', True, '1 GiB').to_json())"
BAD = "from baton.cli.gpu.check import Check; print(Check('b', 'bytes', False, '3 are wrong').to_json())"
BROKEN = "raise RuntimeError('no such kernel')"
TELLS_ITS_PID = (
    "import os, time; from baton.cli.gpu.check import Check"
    "; print(Check('a', 'memory', True, str(os.getpid())).to_json(), flush=True); time.sleep(60)"
)
HUNG = GOOD + "; import time, sys; sys.stdout.flush(); time.sleep(3600)"


def run(capsys, programs: dict[str, str], seconds: float = 30.0) -> tuple[int, list[str]]:
    limits = dict.fromkeys(programs, seconds)
    status = doctor.run_steps(list(programs), lambda name: [sys.executable, "-c", programs[name]], limits)
    return status, capsys.readouterr().out.splitlines()


def test_all_is_well(capsys):
    status, lines = run(capsys, {"a": GOOD})
    assert status == 0 and lines[-1] == "0 failures"
    assert lines[0].split() == ["ok", "a", "memory", "1", "GiB"]


def test_failures_are_counted(capsys):
    status, lines = run(capsys, {"a": GOOD, "b": BAD, "c": BROKEN})
    assert status == 1 and lines[-1] == "2 failures"
    assert "FAIL" in lines[1] and "3 are wrong" in lines[1]
    assert "broke off with status 1: RuntimeError: no such kernel" in lines[2]


def test_a_step_that_hangs_ends_when_its_time_is_up(capsys):
    status, lines = run(capsys, {"a": HUNG}, seconds=5.0)
    assert status == 1
    assert [line.split()[0] for line in lines] == ["ok", "FAIL", "1"] and "not done within 5 s" in lines[1]


def test_what_ends_the_doctor_ends_the_step():
    """Ctrl-C goes to the doctor alone: a step has a session of its own."""

    def interrupt(check: Check) -> None:
        pids.append(int(check.text))
        raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        doctor.run_step("a", [sys.executable, "-c", TELLS_ITS_PID], 60, interrupt)
    assert not psutil.pid_exists(pids[0])
    assert not any(
        isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in threading.enumerate()
    )


DOCTOR = """
import signal, sys
from baton.cli.gpu import doctor
from baton.cli.main import main

signal.signal(signal.SIGHUP, signal.{hangup})  # whatever these tests were started with
doctor.gpu_refusal, doctor.STEPS = lambda: None, {{"a": 60}}
doctor.step_command = lambda name, model: [sys.executable, "-c", {step!r}]
sys.exit(main(["doctor", "--gpu"]))
"""


@pytest.fixture
def start_doctor():
    """Return a doctor whose one step runs, and that step."""
    started: list[psutil.Process] = []

    def start(hangup: str = "SIG_DFL") -> tuple[subprocess.Popen, psutil.Process]:
        argv = [sys.executable, "-c", DOCTOR.format(hangup=hangup, step=TELLS_ITS_PID)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(psutil.Process(process.pid))
        started.append(psutil.Process(int(process.stdout.readline().split()[-1])))
        return process, started[-1]

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_doctor_ends_its_step(start_doctor, number):
    process, step = start_doctor()
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 1 and errors == "baton doctor: interrupted\n"
    assert not step.is_running()


def test_a_doctor_that_hangups_are_kept_from_goes_on(start_doctor):
    """`nohup baton doctor --gpu`."""
    process, step = start_doctor(hangup="SIG_IGN")
    process.send_signal(signal.SIGHUP)
    step.kill()
    out, errors = process.communicate()
    assert process.returncode == 1 and "broke off with status -9" in out and not errors


def test_the_steps_fit_into_twelve_minutes():
    assert sum(doctor.STEPS.values()) <= doctor.LIMIT_S == 720


def test_what_is_no_check():
    for line in ("noise", "{}", '{"step": 1}'):
        with pytest.raises(ValueError):
            Check.from_json(line)


@pytest.mark.skipif(find_runtime() is not None, reason="this machine has a GPU")
def test_without_a_gpu_it_is_one_line():
    argv = [sys.executable, "-m", "baton.cli", "doctor", "--gpu"]
    done = subprocess.run(argv, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert done.returncode == 1 and not done.stderr
    assert line.startswith("baton doctor --gpu: no GPU can be used: ") and line.endswith("; 1 failure")


def test_a_model_needs_its_flag():
    argv = [sys.executable, "-m", "baton.cli", "doctor", "--model", "folder"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2 and "--gpu alone" in done.stderr
