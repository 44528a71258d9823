"""Workers and gateways that start in a tenth of a second, for runs that start hundreds: forked from a process that has imported
what they import.

`Nursery(folder)` runs program.py. For each request that forks; what comes of it is its child, with a session, files,
environment and failpoints of its own, and runs its module as `python -m MODULE` would. It tells how its children ended.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from tests.support.faults.world import ProxiedStack
from tests.support.process import Process, environment

_START_S = 60.0


class Nursery:
    """`with Nursery(folder) as nursery`; its children end with it."""

    def __init__(self, folder: Path):
        self._path = folder / "nursery"
        argv = [sys.executable, "-m", "tests.support.nursery.program", str(self._path)]
        self._process = Process("nursery-process", argv, folder, {"OMP_NUM_THREADS": "1"})

    def __enter__(self) -> "Nursery":
        self._process.ready(_START_S)
        return self

    def __exit__(self, *exc) -> None:
        self._process.kill()

    def process(self, *args) -> "Born":
        """Return a Process of these arguments."""
        return Born(self, *args)

    def bear(self, argv: list[str], descriptors: Mapping[int, int], env: Mapping[str, str | None]) -> "Child":
        """`argv`: PYTHON -m MODULE ARGUMENTS; `descriptors`: of this process, by the number that each shall have; `env`: beside
        that of this process."""
        wish = {"argv": argv[2:], "numbers": [*descriptors], "env": environment(env)}
        return Child(self, int(self._ask(wish, descriptors.values())))

    def status(self, pid: int) -> int | None:
        """Return the status that a child has ended with, None while it runs."""
        return json.loads(self._ask({"pid": pid}))

    def _ask(self, wish: dict, descriptors: Iterable[int] = ()) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_START_S)
            connection.connect(str(self._path))
            socket.send_fds(connection, [json.dumps(wish).encode()], [*descriptors])
            return connection.recv(64)


class Child:
    """As much of subprocess.Popen as tests/support/process.py and baton/engine/ranks/process.py use."""

    stdin: IO[str]
    stdout: IO[str]

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


class BornRanks:
    """In the place of the module subprocess, for baton/engine/ranks/process.py: ranks are born in a nursery."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, nursery: Nursery):
        self._nursery, self._python = nursery, sys.executable

    def Popen(self, argv: list[str], *, pass_fds: Iterable[int], **options) -> Child | subprocess.Popen:
        """Another program than this Python is started as ever."""
        if argv[0] != self._python:
            return subprocess.Popen(argv, pass_fds=pass_fds, **options)
        (stdin, told), (said, stdout) = os.pipe(), os.pipe()
        child = self._nursery.bear(argv, {0: stdin, 1: stdout, 2: 2, **{each: each for each in pass_fds}}, {})
        os.close(stdin)
        os.close(stdout)
        child.stdin, child.stdout = os.fdopen(told, "w"), os.fdopen(said)
        return child


class NurseryStack(ProxiedStack):
    """Of processes that are born in a nursery of the stack's own."""

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

    def _start(self, env: Mapping[str, str | None]) -> Child:
        with self.out.open("wb") as out, self.log.open("wb") as log:
            return self._nursery.bear(self.argv, {1: out.fileno(), 2: log.fileno()}, env)
