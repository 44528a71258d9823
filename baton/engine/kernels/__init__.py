"""Triton kernels for GPUs, and the switch for its interpreter, which runs them on a CPU for tests."""

import importlib.util
import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton itself reads it, when it is first imported


def unavailable(device: str) -> str:
    """Return why there are no Triton kernels on `device` (cuda | cpu); "" if there are."""
    if device != "cuda" and not INTERPRETED:
        return "needs a CUDA device"
    return "" if importlib.util.find_spec("triton") else "triton is not installed: pip install 'baton-llm[gpu]'"
