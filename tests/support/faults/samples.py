"""Sample the memory, descriptors and threads of processes over time, and find those that grow."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import psutil

from tests.support.process import Process

WARM_S = 20 * 60.0  # before it a slope says nothing
WINDOW_S = 10 * 60.0  # of which bursts are a minute or two
MAX_RSS_SLOPE = 1.0  # MiB/h
_MIB = 1 << 20


class Samples:
    """Samples of every life of every process, by name and pid; and of other numbers, by name."""

    def __init__(self, bounds: Mapping[str, float] = {}) -> None:
        """`bounds`: the highest that a number may be, where that says more than its growth."""
        self._bounds = bounds
        self._began = time.monotonic()
        self._values: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def take(self, processes: Iterable[Process], **others: float) -> None:
        at = time.monotonic() - self._began
        for process in processes:
            try:
                seen = psutil.Process(process.pid)
                with seen.oneshot():
                    memory, threads, descriptors = seen.memory_info().rss / _MIB, seen.num_threads(), seen.num_fds()
            except psutil.Error:  # dead, or about to be
                continue
            life = f"{process.name} {process.pid}"
            for name, value in (("rss MiB", memory), ("threads", threads), ("descriptors", descriptors)):
                self._values[f"{life} {name}"].append((at, value))
        for name, value in others.items():
            self._values[name].append((at, value))

    def add_all(self, name: str, points: Iterable[tuple[float, float]]) -> None:
        """(seconds since the beginning, value)."""
        self._values[name] += points

    def save(self, path: Path) -> None:
        """Write all of it: name -> [[seconds since the beginning, value]]."""
        path.write_text(json.dumps(self._values))

    def slopes(self, warm_s: float = WARM_S, last: float = 1.0) -> dict[str, float]:
        """Return growth an hour of what was seen for at least as long again after `warm_s` of its life; in the last
        part of that time, where `last` is less than 1: what grows to a bound grows less there, a leak as much."""
        found = {}
        for name, points in self._values.items():
            began, ended = points[0][0] + warm_s, points[-1][0]
            if ended - began >= warm_s:
                since = ended - last * (ended - began)
                found[name] = slope([(at, value) for at, value in points if at >= since])
        return found

    def missed_gates(self, warm_s: float = WARM_S) -> list[str]:
        """Return the figures that fail a gate: what is above its bound, and of the others what grows over all of its
        time and in the last half of it: memory by 1 MiB an hour, everything else by more than a tenth of its mean."""
        faults = []
        for name, bound in self._bounds.items():
            highest = max((value for _, value in self._values.get(name, ())), default=0.0)
            if highest > bound:
                faults.append(f"{name} were {highest:g}, at most {bound:g}")
        later = self.slopes(warm_s, last=0.5)
        for name, whole in self.slopes(warm_s).items():
            found = min(whole, later[name])
            points = [value for at, value in self._values[name] if at - self._values[name][0][0] >= warm_s]
            allowed = MAX_RSS_SLOPE if name.endswith("MiB") else max(2.0, 0.1 * statistics.fmean(points))
            if name not in self._bounds and found > allowed:
                faults.append(f"{name} grows by {found:.2f} an hour, at most {allowed:.2f}")
        return faults


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return growth an hour: the median slope between any two of the windows' medians (Theil and Sen), which neither a
    burst nor a window that was unlike the others moves, and which a leak moves by all of itself."""
    windows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for at, value in points:
        windows[int((at - points[0][0]) // WINDOW_S)].append((at, value))
    medians = [tuple(statistics.median(column) for column in zip(*window, strict=True)) for window in windows.values()]
    slopes = [(late - early) / (end - begin) for (begin, early), (end, late) in combinations(medians, 2)]
    return 3600 * statistics.median(slopes) if slopes else 0.0
