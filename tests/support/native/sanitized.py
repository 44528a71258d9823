"""pytest -p tests.support.native.sanitized: the native kernels with AddressSanitizer and UndefinedBehaviorSanitizer in
them, which end the process at the first fault. The interpreter must have the sanitizers' libraries preloaded."""

import os
import subprocess
from pathlib import Path

from baton.engine.native import build, compiler, tier

FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
compiler.FLAGS = tuple(flag for flag in compiler.FLAGS if flag != "-O3") + FLAGS
# The interpreter and torch free nothing when they end; gcc's C++ library is not the one that torch was built with.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
}


def compiled() -> Path:
    """Build the library, in a process that does not load it."""
    return build.built(compiler.find(), tier.available()[-1])


def preloaded() -> str:
    """Return the sanitizers' libraries of the compiler, for LD_PRELOAD; empty where it has none."""
    names = [_output("-print-file-name=" + name) for name in ("libasan.so", "libubsan.so")]
    return ":".join(names) if all(map(os.path.isabs, names)) else ""


def _output(option: str) -> str:
    return subprocess.run([*compiler.find(), option], capture_output=True, text=True, check=True).stdout.strip()
