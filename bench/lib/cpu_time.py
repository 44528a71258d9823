"""CPU time of other processes."""

import psutil


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has taken so far, user and system, in hundredths of a second."""
    times = process.cpu_times()
    return times.user + times.system
