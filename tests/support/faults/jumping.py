"""Runs a module under a wall clock that jumps: python -m tests.support.faults.jumping MODULE ARGUMENTS.

SIGUSR1 puts it an hour on, SIGUSR2 an hour back. Only time.time and time.time_ns know of it, as with a real jump:
time.monotonic runs as before. gRPC's own clock cannot be moved from here, so what it is compared with is not either.
"""

import runpy
import signal
import sys
import time
from types import SimpleNamespace

from grpc._cython import cygrpc

JUMP_S = 3600
_offset_s = 0
_time, _time_ns = time.time, time.time_ns


def _jump(seconds: int) -> None:
    global _offset_s
    _offset_s += seconds


def _wall() -> float:
    return _time() + _offset_s


def main() -> None:
    cygrpc.time = SimpleNamespace(**{**vars(cygrpc.time), "time": _time})
    time.time = _wall
    time.time_ns = lambda: _time_ns() + _offset_s * 1_000_000_000
    signal.signal(signal.SIGUSR1, lambda *_: _jump(JUMP_S))
    signal.signal(signal.SIGUSR2, lambda *_: _jump(-JUMP_S))
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
