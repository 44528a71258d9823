"""Workers and gateways that start in a tenth of a second, for runs that start hundreds: forked from a process that has
imported what they import.

`ForkServer(folder)` runs program.py. It forks for each request; what comes of it is its child, with a session, files,
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


class ForkServer:
    """`with ForkServer(folder) as fork_server`; its children end with it."""

    def __init__(self, folder: Path):
        self._path = folder / "socket"
        argv = [sys.executable, "-m", "tests.support.fork_server.program", str(self._path)]
        self._process = Process("fork-server", argv, folder, {"OMP_NUM_THREADS": "1"})

    def __enter__(self) -> "ForkServer":
        self._process.ready(_START_S)
        return self

    def __exit__(self, *exc) -> None:
        self._process.kill()

    def process(self, *args) -> "ForkedProcess":
        """Return a Process of these arguments."""
        return ForkedProcess(self, *args)

    def fork(self, argv: list[str], descriptors: Mapping[int, int], env: Mapping[str, str | None]) -> "Child":
        """`argv`: PYTHON -m MODULE ARGUMENTS; `descriptors`: of this process, by the number that each shall have;
        `env`: beside that of this process."""
        request = {"argv": argv[2:], "numbers": [*descriptors], "env": environment(env)}
        return Child(self, int(self._ask(request, descriptors.values())))

    def status(self, pid: int) -> int | None:
        """Return the status that a child has ended with, None while it runs."""
        return json.loads(self._ask({"pid": pid}))

    def _ask(self, request: dict, descriptors: Iterable[int] = ()) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_START_S)
            connection.connect(str(self._path))
            socket.send_fds(connection, [json.dumps(request).encode()], [*descriptors])
            return connection.recv(64)


class Child:
    """As much of subprocess.Popen as tests/support/process.py and baton/engine/ranks/process.py use."""

    stdin: IO[str]
    stdout: IO[str]

    def __init__(self, fork_server: ForkServer, pid: int):
        self.pid, self.returncode = pid, None
        self._fork_server = fork_server
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._fork_server.status(self.pid)
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


class ForkedRanks:
    """In the place of the module subprocess, for baton/engine/ranks/process.py: ranks are forked from a fork server."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, fork_server: ForkServer):
        self._fork_server, self._python = fork_server, sys.executable

    def Popen(self, argv: list[str], *, pass_fds: Iterable[int], **options) -> Child | subprocess.Popen:
        """Another program than this Python is started as ever."""
        if argv[0] != self._python:
            return subprocess.Popen(argv, pass_fds=pass_fds, **options)
        (stdin, told), (said, stdout) = os.pipe(), os.pipe()
        child = self._fork_server.fork(argv, {0: stdin, 1: stdout, 2: 2, **{each: each for each in pass_fds}}, {})
        os.close(stdin)
        os.close(stdout)
        child.stdin, child.stdout = os.fdopen(told, "w"), os.fdopen(said)
        return child


class ForkServerStack(ProxiedStack):
    """Of processes that are forked from a fork server of the stack's own."""

    def __enter__(self) -> "ForkServerStack":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fork_server = ForkServer(self.folder)
        self.fork_server.__enter__()
        return super().__enter__()

    def stop(self) -> dict[str, int]:
        statuses = super().stop()
        self.fork_server.__exit__()
        return statuses


class ForkedProcess(Process):
    """A process that a fork server starts."""

    def __init__(self, fork_server: ForkServer, *args):
        self._fork_server = fork_server
        super().__init__(*args)

    def _start(self, env: Mapping[str, str | None]) -> Child:
        with self.out.open("wb") as out, self.log.open("wb") as log:
            return self._fork_server.fork(self.argv, {1: out.fileno(), 2: log.fileno()}, env)
