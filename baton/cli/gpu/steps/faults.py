"""Step 9: check that a kernel fault ends its worker within a second, and that a request survives the kill of a prefill
worker."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from baton.cli.gpu.check import Say
from baton.cli.gpu.steps.workers import answer, stack

WITHIN_S = 1.0
# An index outside a tensor stops the kernel; afterwards every call of the process fails, as after a hardware fault.
FAULTY = """
import sys, time
import torch
from baton.cli.gpu.random_engine import RandomEngine
from baton.engine.loop import EngineLoop
from baton.service.fatal import exit_for_lost_device
made = RandomEngine("bf16", torch.device("cuda", 0), (1, 256, 512, 4, 2, 64, 1000), max_num_seqs=2, context=256, chunk=128)
def step():
    print(time.time(), flush=True)
    torch.zeros(1, device="cuda")[torch.tensor([9], device="cuda")].cpu()
made.engine.step = step
loop = EngineLoop(made.engine, print, exit_for_lost_device)
loop.start()
time.sleep(20)
sys.exit(3)
"""


def check(say: Say, model: Path | None, faulty: str = FAULTY) -> None:
    _lost_device(say, faulty)
    _lost_worker(say)


def _lost_device(say: Say, faulty: str) -> None:
    done = subprocess.run([sys.executable, "-c", faulty], capture_output=True, text=True, timeout=30)
    ended_at = time.time()
    lines = done.stdout.splitlines()
    if not lines:
        say("a kernel's fault", False, f"could not be provoked: {done.stderr.strip()[-100:]}")
        return
    seconds = ended_at - float(lines[0])
    is_right = done.returncode == 1 and seconds < WITHIN_S
    say("a kernel's fault", is_right, f"the process ended with {done.returncode} after {seconds:.2f} s")


def _lost_worker(say: Say) -> None:
    with stack("--prefill", "1", "--decode", "1") as (target, process):
        before = answer(target)
        for pid in _children(process.pid, "prefill_worker"):
            os.kill(pid, signal.SIGKILL)
        after = answer(target)
    is_right = bool(before) and before == after
    say("a killed prefill worker", is_right, "the next answer is the same" if is_right else f"then: {after[:80]!r}")


def _children(parent: int, name: str) -> list[int]:
    """Return the ids of processes started by `parent` whose command line contains `name`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue  # the process has ended
        if int(fields[1]) == parent and name.encode() in command:
            found.append(int(status.parent.name))
    return found
