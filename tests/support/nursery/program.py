"""`python -m tests.support.nursery.program SOCKET`: fork a worker for each request, see workers.py. It has imported third-party
packages and nothing of Baton's, which each child reads by itself, with its own environment."""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys

_PACKAGES = (
    "torch", "numpy", "grpc", "grpc.aio", "google.protobuf", "safetensors.torch", "prometheus_client", "tokenizers",
    "llguidance", "uvicorn", "uvicorn.protocols.http.httptools_impl", "starlette.applications", "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
)  # fmt: skip
_DEATH_SIGNAL = 1  # of prctl(2)
_MOST_DESCRIPTORS = 16  # of a child


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    for package in _PACKAGES:
        importlib.import_module(package)
    gc.collect()
    gc.freeze()  # else each child looks through what all have in common, and so copies it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready here=1", flush=True)
        while (born := _next_born(listener)) is None:
            pass
    _live(*born)


def _next_born(listener: socket.socket) -> tuple[dict, list[int]] | None:
    """None in the nursery itself; in the child that was asked for, what it shall be, and its descriptors."""
    connection, _ = listener.accept()
    with connection:
        message, given, _, _ = socket.recv_fds(connection, 1 << 17, _MOST_DESCRIPTORS)
        wish = json.loads(message)
        if "pid" in wish:
            ended, status = os.waitpid(wish["pid"], os.WNOHANG)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
            return None
        if os.fork():
            for each in given:
                os.close(each)
            return None
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        connection.send(str(os.getpid()).encode())
    return wish, given


def _live(wish: dict, given: list[int]) -> None:
    beyond = max(wish["numbers"]) + 1
    apart = [
        fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, beyond) for each in given
    ]  # what is given may have a number of another's
    for number, each in zip(wish["numbers"], apart, strict=True):
        os.dup2(each, number)
    for each in {*given, *apart} - {*wish["numbers"]}:
        os.close(each)
    os.environ.clear()
    os.environ.update(wish["env"])
    sys.argv = [sys.executable, *wish["argv"][1:]]
    runpy.run_module(wish["argv"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
