"""Assign the GPUs of this machine to the workers of one `baton up`."""

import os
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.core.config import MIN_CAPABILITY
from kvtransfer.memory.cuda_runtime import find_runtime

VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpuShare(NamedTuple):
    """The GPUs that one worker sees: its own first, then the others, which it may copy from; and how many workers share
    its own."""

    visible: tuple[str, ...]
    num_workers: int
    places: tuple["GpuShare", ...] = ()  # for a worker with several GPUs: the share of each

    @property
    def env(self) -> dict[str, str]:
        return {VISIBLE: ",".join(self.visible)}


def visible_gpus() -> list[str]:
    """Return the GPUs that workers may use, named as in CUDA_VISIBLE_DEVICES, or by number. The driver is asked as
    workers' settings ask it, which takes no GPU memory."""
    runtime = find_runtime()
    if runtime is None:
        return []
    count = runtime.num_devices()
    names = _named(os.environ.get(VISIBLE, ",".join(map(str, range(count)))))
    fit = [name for index, name in enumerate(names[:count]) if runtime.capability(index) >= MIN_CAPABILITY]
    # CUDA shows a process only one part of a divided GPU, however many are named.
    return fit + [name for name in names[count:] if name.startswith("MIG-")]


def _named(named: str) -> list[str]:
    found: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        if name in ("", "-1"):
            break  # CUDA ignores names after an invalid one
        found.append(name)
    return found


def deal_gpus(gpus: Sequence[str], num_workers: int) -> list[GpuShare]:
    """Return a share for each worker, in turn; empty if there is no GPU."""
    if not gpus:
        return []
    shares: list[GpuShare] = []
    for index in range(num_workers):
        own = index % len(gpus)
        sharing = len(range(own, num_workers, len(gpus)))
        shares.append(GpuShare((*gpus[own:], *gpus[:own]), sharing))
    return shares


class GpuSlots:
    """Free places for workers on GPUs: for the first workers as `deal_gpus` assigns them, and one on each GPU that is
    left."""

    def __init__(self, gpus: Sequence[str], num_first: int):
        self._free = deque(deal_gpus(gpus, max(num_first, len(gpus))))
        self.num_gpus, self.num_used = len(gpus), min(len(gpus), num_first)

    def take(self, count: int = 1) -> GpuShare | None:
        """Return the place of another worker with `count` GPUs; None if there is no GPU at all. Raises IndexError if
        fewer are free."""
        if not self.num_gpus:
            return None
        free: dict[str, GpuShare] = {}
        for place in self._free:
            free.setdefault(place.visible[0], place)
        taken = [*free.values()][:count]
        if len(taken) < count:
            raise IndexError
        for place in taken:
            self._free.remove(place)
        own = tuple(place.visible[0] for place in taken)
        others = (name for name in taken[0].visible if name not in own)
        return GpuShare((*own, *others), max(place.num_workers for place in taken), tuple(taken))

    def give_back(self, share: GpuShare | None) -> None:
        if share is not None:
            self._free.extend(share.places)
