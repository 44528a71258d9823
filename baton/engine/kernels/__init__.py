"""Triton kernels for GPUs, and the switch for its interpreter, which runs them on a CPU for tests."""

import importlib.util
import os
import subprocess

from baton.lines import one_line

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton itself reads it on its first import


def unavailable(device: str) -> str:
    """Return why there are no Triton kernels on `device` (cuda | cpu); "" if there are."""
    if device != "cuda" and not INTERPRETED:
        return "needs a CUDA device"
    return "" if importlib.util.find_spec("triton") else "triton is not installed: pip install triton"


def prepare() -> None:
    """Make Triton build its launcher now, with a C compiler of this machine, or take it from its cache. Raises
    ValueError, in one line, if it cannot; at the first launch that would be a traceback, after a model was read."""
    if INTERPRETED or unavailable("cuda"):
        return
    from triton.runtime import driver  # an optional dependency

    try:
        _ = driver.active.utils  # pyright: ignore[reportAttributeAccessIssue]
    except (RuntimeError, AssertionError, ImportError, subprocess.CalledProcessError) as error:
        raise ValueError(
            "Triton cannot build what launches its kernels: it needs gcc or clang, Python's headers (python3-dev) and "
            f"libcuda.so.1 in `ldconfig -p`; or give device cpu ({one_line(error, 160)})"
        ) from None
