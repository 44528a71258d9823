"""`python -m tests.support.nursery.program SOCKET`: fork a worker for each request, see workers.py. It has imported third-party
packages and nothing of Baton's, which each child reads by itself, with its own environment."""

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

_PACKAGES = ("torch", "numpy", "grpc", "grpc.aio", "google.protobuf", "safetensors", "prometheus_client")
_DEATH_SIGNAL = 1  # of prctl(2)


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
