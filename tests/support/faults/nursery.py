"""Workers that start in a tenth of a second, for runs that start hundreds: forked from a process that has read torch.

`Nursery(folder)` runs `python -m tests.support.faults.nursery SOCKET`, which has imported third-party packages and nothing of
Baton's. For each request it forks; what comes of it is its child, with a session, files, environment and failpoints of
its own, and runs its module as `python -m MODULE` would. It tells how its children ended.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support.faults.world import ProxiedStack
from tests.support.process import Process

_PACKAGES = ("torch", "numpy", "grpc", "grpc.aio", "google.protobuf", "safetensors", "prometheus_client")
_DEATH_SIGNAL = 1  # of prctl(2)
_START_S = 60.0


class Nursery:
    """`with Nursery(folder) as nursery`; its children end with it."""

    def __init__(self, folder: Path):
        self._path = folder / "nursery"
        argv = [sys.executable, "-m", "tests.support.faults.nursery", str(self._path)]
        self._process = Process("nursery-process", argv, folder, {"OMP_NUM_THREADS": "1"})

    def __enter__(self) -> "Nursery":
        self._process.ready(_START_S)
        return self

    def __exit__(self, *exc) -> None:
        self._process.kill()

    def process(self, *args) -> "Born":
        """Return a Process of these arguments."""
        return Born(self, *args)

    def bear(self, argv: list[str], out: Path, log: Path, env: dict[str, str]) -> "Child":
        """`argv`: PYTHON -m MODULE ARGUMENTS; `env`: beside that of this process."""
        wish = {"argv": argv[2:], "out": str(out), "log": str(log), "env": {**os.environ, **env}}
        return Child(self, int(self._ask(wish)))

    def status(self, pid: int) -> int | None:
        """Return the status that a child has ended with, None while it runs."""
        return json.loads(self._ask({"pid": pid}))

    def _ask(self, wish: dict) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_START_S)
            connection.connect(str(self._path))
            connection.send(json.dumps(wish).encode())
            return connection.recv(64)


class Child:
    """As much of subprocess.Popen as tests/support/process.py uses."""

    def __init__(self, nursery: Nursery, pid: int):
        self.pid, self.returncode = pid, None
        self._nursery = nursery
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._nursery.status(self.pid)
            return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        deadline = time.monotonic() + (timeout_s if timeout_s is not None else _START_S)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class NurseryStack(ProxiedStack):
    """Workers are born in a nursery of the stack's own, gateways as always."""

    def __enter__(self) -> "NurseryStack":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.nursery = Nursery(self.folder)
        self.nursery.__enter__()
        return super().__enter__()

    def stop(self) -> dict[str, int]:
        statuses = super().stop()
        self.nursery.__exit__()
        return statuses


class Born(Process):
    """A process that a nursery starts."""

    def __init__(self, nursery: Nursery, *args):
        self._nursery = nursery
        super().__init__(*args)

    def _start(self, env: dict[str, str]) -> Child:
        self.out.touch()
        self.log.touch()
        return self._nursery.bear(self.argv, self.out, self.log, env)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    for package in _PACKAGES:
        importlib.import_module(package)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready here=1", flush=True)
        while (wish := _next_wish(listener)) is None:
            pass
    _live(wish)


def _next_wish(listener: socket.socket) -> dict | None:
    """None in the nursery itself; in the child that was asked for, what it shall be."""
    connection, _ = listener.accept()
    with connection:
        wish = json.loads(connection.recv(1 << 17))
        if "pid" in wish:
            ended, status = os.waitpid(wish["pid"], os.WNOHANG)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
            return None
        if os.fork():
            return None
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        connection.send(str(os.getpid()).encode())
    return wish


def _live(wish: dict) -> None:
    for number, path in ((1, wish["out"]), (2, wish["log"])):
        with Path(path).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(wish["env"])
    sys.argv = [sys.executable, *wish["argv"][1:]]
    runpy.run_module(wish["argv"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
