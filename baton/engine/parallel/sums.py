"""Measure how fast the ranks of a worker add, and how fast its host copies, once when all ranks are ready."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.parallel.collectives import Collectives

NUM_SUMS = 8
COPY_BYTES = 32 << 20  # larger than caches


class SumSpeed(NamedTuple):
    """Report the speed of sums over all ranks in the compute dtype."""

    row_us: float  # microseconds for one row of the hidden size
    bytes_per_s: float  # for rows of a whole step: bytes of one rank's part
    copy_bytes_per_s: float


def sum_often(collectives: Collectives, rows: Tensor) -> float:
    """Add the rows of all ranks several times; return the seconds of the quickest sum."""
    part, seconds = rows.to(rows.dtype if collectives.fast else torch.float32), []
    _finish(rows.device)
    for _ in range(NUM_SUMS):
        begun = time.perf_counter()
        collectives.sum(part, rows.dtype)
        _finish(rows.device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def copy_bytes_per_s(device: torch.device) -> float:
    """Return how many bytes this host copies in a second with as many threads as the ranks have, or how many a GPU
    copies in its memory."""
    source, seconds = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device), []
    target = torch.zeros_like(source)
    _finish(device)
    for _ in range(4):
        begun = time.perf_counter()
        target.copy_(source)
        _finish(device)
        seconds.append(time.perf_counter() - begun)
    return COPY_BYTES / min(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
