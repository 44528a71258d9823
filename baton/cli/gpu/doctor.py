"""Run the steps one after the other, each in a process with a time limit: a kernel that hangs, or a fault that breaks
the CUDA context, costs one row of the table and not the others."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from baton.cli.gpu.check import Check
from baton.service.exits import WRONG_USE, fail
from kvtransfer.memory.cuda_runtime import gpu_refusal

LIMIT_S = 720.0
# The most telling steps first; seconds for each. Their sum is below LIMIT_S.
STEPS = {
    "host": 20, "copies": 50, "kernels": 120, "graphs": 80, "engine": 110, "workers": 90, "model": 80, "groups": 120,
    "faults": 40,
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", action="store_true", help="check this GPU host instead, within twelve minutes: no stack needs to run"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="with --gpu: a model folder, which an engine tries beside transformers",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and the number of failures; return 0 without failures, else 1; 2 for wrong use."""
    if not args.gpu:
        return fail("baton doctor", "--model has an effect with --gpu alone", WRONG_USE)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, signal.default_int_handler)  # so that the step ends too: it would keep the GPU
    if why := gpu_refusal():
        print(f"baton doctor --gpu: no GPU can be used: {why}; 1 failure")
        return 1
    return run_steps(list(STEPS), lambda name: step_command(name, args.model), STEPS)


def run_steps(names: Sequence[str], command: Callable[[str], list[str]], seconds: Mapping[str, float]) -> int:
    """Run the steps and print their rows; return 1 if a check failed, else 0. `command(name)` is a step's command
    line."""
    failures = 0

    def add(check: Check) -> None:
        nonlocal failures
        failures += check.is_right is False
        print(check.row, flush=True)

    deadline = time.monotonic() + LIMIT_S
    for name in names:
        run_step(name, command(name), min(seconds[name], deadline - time.monotonic()), add)
    print(f"{failures} {'failure' if failures == 1 else 'failures'}")
    return 1 if failures else 0


def step_command(name: str, model: Path | None) -> list[str]:
    return [sys.executable, "-m", "baton.cli.gpu.step", name, *([] if model is None else [str(model)])]


def run_step(name: str, command: Sequence[str], limit_s: float, add: Callable[[Check], None]) -> None:
    """Run a step and add its checks as they are printed; add a failure if the step breaks off or exceeds its time."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        is_late = threading.Event()
        timer = threading.Timer(max(limit_s, 0.1), _end_late, (process, is_late))
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                with suppress(ValueError):  # lines that libraries print
                    add(Check.from_json(line))
            status = process.wait()
        finally:  # also after Ctrl-C
            timer.cancel()
            _end(process)  # also ends processes that the step has left behind
            process.wait()
        if status and is_late.is_set():
            add(Check(name, "time", False, f"not done within {limit_s:.0f} s"))
        elif status:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()] or ["(nothing)"]
            add(Check(name, "step", False, f"broke off with status {status}: {lines[-1].strip()}"))


def _end_late(process: subprocess.Popen, is_late: threading.Event) -> None:
    is_late.set()
    _end(process)


def _end(process: subprocess.Popen) -> None:
    """Kill the step and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
