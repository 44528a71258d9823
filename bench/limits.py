"""What this machine can do at best: printed beside every figure that it bounds."""

import time
from collections.abc import Callable

import torch

from report import Report

_SIZE_BYTES = 256 << 20  # beyond any cache


def best_seconds(action: Callable[[], object], num_rounds: int = 5) -> float:
    """The fastest of a few runs, after one to warm up: a limit is what was reached at best."""
    action()
    times = []
    for _ in range(num_rounds):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return min(times)


def copy_bytes_per_s() -> float:
    """Reads and writes counted both."""
    source = torch.ones(_SIZE_BYTES, dtype=torch.uint8)
    destination = torch.empty_like(source)
    return 2 * _SIZE_BYTES / best_seconds(lambda: destination.copy_(source))


def read_bytes_per_s() -> float:
    values = torch.ones(_SIZE_BYTES // 4)
    return _SIZE_BYTES / best_seconds(values.sum)


def gemm_flops(dtype: torch.dtype, size: int = 1024) -> float:
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    return 2 * size**3 / best_seconds(lambda: a @ b)


def add_rows(report: Report) -> None:
    """Copy bandwidth, a read sweep, and GEMM rates, with as many threads as torch takes by itself."""
    report.add("machine: copy of 256 MiB", copy_bytes_per_s() / 1e9, "GB/s")
    report.add("machine: read of 256 MiB", read_bytes_per_s() / 1e9, "GB/s")
    report.add("machine: GEMM 1024, fp32", gemm_flops(torch.float32) / 1e9, "GFLOP/s")
    report.add("machine: GEMM 1024, bf16", gemm_flops(torch.bfloat16) / 1e9, "GFLOP/s")
