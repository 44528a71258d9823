"""CPU time of other processes."""

import psutil


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has taken so far, user and system, in hundredths of a second."""
    times = process.cpu_times()
    return times.user + times.system


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of all its descendants that live."""
    process = psutil.Process(pid)
    return sum(cpu_s(each) for each in (process, *process.children(recursive=True)))
