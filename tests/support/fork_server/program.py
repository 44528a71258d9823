"""Fork a process for each request that comes to a socket: `python -m tests.support.fork_server.program SOCKET`. The
requests are made by processes.py.

Before the first, the program imports all that workers import (Baton's own modules alone took each worker 0.25 s of
CPU), and third parties' packages for gateways. It imports no module of the gateway itself: some of these draw a random
number when they are imported, which all children would share. baton.failpoints is imported again in each child, because
it reads its environment variable at import; baton.engine.kernels is not, as TRITON_INTERPRET is the same for all."""

import atexit
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
import threading

_MODULES = (
    "torch", "numpy", "grpc", "grpc.aio", "google.protobuf", "safetensors.torch", "prometheus_client", "tokenizers",
    "llguidance", "uvicorn", "uvicorn.protocols.http.httptools_impl", "starlette.applications", "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection", "jinja2.sandbox", "ahocorasick_rs",
    "baton.worker.main", "baton.worker.app", "prefill_worker.states", "decode_worker.states",
)  # fmt: skip
_DEATH_SIGNAL = 1  # of prctl(2)
_MOST_DESCRIPTORS = 16  # of a child


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    given = {**os.environ}
    for module in _MODULES:
        importlib.import_module(module)
    by_imports = {name: value for name, value in os.environ.items() if name not in given}
    gc.collect()
    gc.freeze()  # else each child looks through what all have in common, and so copies it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready here=1", flush=True)
        while (child := _next_child(listener)) is None:
            pass
    _run_child(*child, by_imports)


def _next_child(listener: socket.socket) -> tuple[dict, list[int]] | None:
    """Return none in the server itself; in the child that was asked for, what it shall be, and its descriptors."""
    connection, _ = listener.accept()
    with connection:
        message, given, _, _ = socket.recv_fds(connection, 1 << 17, _MOST_DESCRIPTORS)
        request = json.loads(message)
        if "pid" in request:
            ended, status = os.waitpid(request["pid"], os.WNOHANG)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
            return None
        if os.fork():
            for each in given:
                os.close(each)
            return None
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        connection.send(str(os.getpid()).encode())
    return request, given


def _run_child(request: dict, given: list[int], by_imports: dict[str, str]) -> None:
    """`by_imports`: variables that these have set."""
    beyond = max(request["numbers"]) + 1
    apart = [
        fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, beyond) for each in given
    ]  # what is given may have a number of another's
    for number, each in zip(request["numbers"], apart, strict=True):
        os.dup2(each, number)
    for each in {*given, *apart} - {*request["numbers"]}:
        os.close(each)
    program, *arguments = request["argv"]
    os.environ.clear()
    os.environ.update(by_imports | request["env"])
    importlib.reload(sys.modules["baton.failpoints"])
    if not hasattr(sys.modules.get(program), "__path__"):  # else it is a folder, whose `__main__` nobody has imported
        sys.modules.pop(program, None)
    sys.argv = [sys.executable, *arguments]
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        status = ended.code or 0
    if status:
        _end(status)  # a start that fails; what has served ends as Python does, so that a crash there is seen


def _end(status: int) -> None:
    """End as Python does, but without taking apart what it has in common with the server: that took each child 0.25 s
    of CPU."""
    threading._shutdown()
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
