"""Step 6: run a prefill and a decode worker on this machine, with the demo model, of which a GPU holds two, and check
that their answer equals one worker's and which transport moves KV."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.cli.gpu.check import Say
from baton.cli.launch.stack import SHIPPED_MODEL
from kvtransfer.memory.cuda_runtime import find_runtime

PROMPT = "The quick brown fox jumps over the lazy dog, and then " * 12
NUM_TOKENS = 32
START_S = 60.0
_READY = re.compile(r"^ready grpc=(\S+)")


def check(say: Say, model: Path | None) -> None:
    with stack("--prefill", "1", "--decode", "1", "--gateway.split", "always") as (target, _):
        split = answer(target)
        _transport(say, target)
    with stack("--prefill", "0", "--decode", "1") as (target, _):
        whole = answer(target)
    is_right = bool(whole) and split == whole
    say(
        "split equals whole", is_right, f"{len(whole)} characters" if is_right else f"{split[:60]!r} and {whole[:60]!r}"
    )


@contextmanager
def stack(*flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run `baton up` with the demo model, and yield the gateway's address and the process. Raises RuntimeError with its
    last line if it is not ready within START_S, which a large model would not be."""
    argv = [sys.executable, "-m", "baton.cli", "up", "--model", str(SHIPPED_MODEL), "--listen", "127.0.0.1:0", *flags]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, text=True)
        try:
            yield _ready(process, out), process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(process: subprocess.Popen, out) -> str:
    deadline, lines = time.monotonic() + START_S, []
    while time.monotonic() < deadline:
        out.seek(0)
        lines = out.read().splitlines()
        for line in lines:
            if found := _READY.match(line):
                return found[1]
        if process.poll() is not None:
            raise RuntimeError(f"baton up ended with {process.returncode}: {lines[-1] if lines else 'it said nothing'}")
        time.sleep(0.2)
    raise RuntimeError(f"baton up was not ready within {START_S:.0f} s: {lines[-1] if lines else 'it said nothing'}")


def answer(target: str) -> str:
    """Return the greedy text that follows PROMPT; empty if the request failed."""
    argv = [sys.executable, "-m", "baton.cli", "generate", PROMPT, "--target", target, "--max-tokens", str(NUM_TOKENS),
            "--temperature", "0"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def _transport(say: Say, target: str) -> None:
    argv = [sys.executable, "-m", "baton.cli", "doctor", "--target", target, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=40)
    try:
        rows = json.loads(done.stdout)["checks"]
    except (ValueError, KeyError):
        say("transport", False, f"baton doctor said: {(done.stdout + done.stderr)[-100:]}")
        return
    chosen = [row["text"] for row in rows if row["part"] == "handoff" and "chosen" in row["text"]]
    if chosen and "cuda_ipc" not in chosen[0] and not _reach_each_other():
        say("transport", None, f"{chosen[0]}; CUDA offers no copies between these GPUs")
        return
    say("transport", bool(chosen) and "cuda_ipc" in chosen[0], chosen[0] if chosen else "no prompt was handed over")


def _reach_each_other() -> bool:
    runtime = find_runtime()
    assert runtime is not None
    pci_ids = [runtime.pci_id(device) for device in range(runtime.num_devices())]
    return all(runtime.reaches(device, pci_id) for device in range(len(pci_ids)) for pci_id in pci_ids)
