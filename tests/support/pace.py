"""Measure once a session how slow this machine is beside an idle core of a usual one, and lengthen bounds of waiting by
that. Assertions about time itself are not scaled."""

import os
import statistics
import subprocess
import sys
import time

VARIABLE = "BATON_TESTS_PACE"  # inherited by pytest's own workers and by what tests start
_USUAL_S = 0.05  # of what is measured: 0.015 s to start Python, 0.035 s of its own work
_NUM_LOOPS = 1_000_000
_MOST = 8.0  # beyond it something else is wrong


def patience(seconds: float) -> float:
    """Return the bound of a wait that ends by a condition, on this machine."""
    return seconds * slowness()


def slowness() -> float:
    """Return how many times slower than usual this machine is, at least 1."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{of(statistics.median(_once() for _ in range(3))):.2f}"
    return float(os.environ[VARIABLE])


def of(measured_s: float) -> float:
    return min(max(measured_s / _USUAL_S, 1.0), _MOST)


def _once() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    total = 0
    for number in range(_NUM_LOOPS):
        total += number & 7
    return time.perf_counter() - began
