"""CPU time of other processes."""

import psutil


def cpu_s(process: psutil.Process) -> float:
    """Return what it has taken so far, in its own code and in the system's for it; in hundredths of a second."""
    times = process.cpu_times()
    return times.user + times.system
