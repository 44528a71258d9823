"""Measure what processes hold: memory of their own and descriptors; and wait until it falls to the level before."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.pace import patience
from tests.support.process import Process

MORE_DESCRIPTORS = 8  # the bystander's own connections come and go
_ANONYMOUS = re.compile(r"^Anonymous: +(\d+) kB", re.MULTILINE)


class Level(NamedTuple):
    """`mib`: of memory that is not a file's, so without the pool of KV."""

    mib: float
    descriptors: int


class Stayed(NamedTuple):
    """The most that any process did not give back, and faults in words."""

    mib: float
    faults: list[str]


def level(process: Process) -> Level:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return Level(int(_ANONYMOUS.search(rollup)[1]) / 1024, len(os.listdir(f"/proc/{process.pid}/fd")))


def levels(processes: Sequence[Process]) -> dict[str, Level]:
    return {process.name: level(process) for process in processes}


def stayed(processes: Sequence[Process], before: dict[str, Level], tolerance_mib: float, within_s: float) -> Stayed:
    """Wait until every process is back near its level of `before`, for so long at most."""
    deadline = time.monotonic() + patience(within_s)
    while True:
        now, faults = levels(processes), []
        for name, was in before.items():
            if now[name].mib > was.mib + tolerance_mib:
                faults.append(f"{name}: {now[name].mib:.0f} MiB afterwards, {was.mib:.0f} before")
            if now[name].descriptors > was.descriptors + MORE_DESCRIPTORS:
                faults.append(f"{name}: {now[name].descriptors} descriptors afterwards, {was.descriptors} before")
        if not faults or time.monotonic() > deadline:
            return Stayed(max(now[name].mib - was.mib for name, was in before.items()), faults)
        time.sleep(0.05)
