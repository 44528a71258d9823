"""Measure this machine's limits, which are printed beside every figure that they bound."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.lib.report import Report

_SIZE_BYTES = 256 << 20  # larger than any cache


def best_seconds(action: Callable[[], object], num_rounds: int = 5) -> float:
    """Return the shortest time of a few runs after a warm-up: a limit is the best that was reached."""
    action()
    times = []
    for _ in range(num_rounds):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return min(times)


def copy_bytes_per_s() -> float:
    """Return the bytes per second of a copy, counting reads and writes."""
    source = torch.ones(_SIZE_BYTES, dtype=torch.uint8)
    destination = torch.empty_like(source)
    return 2 * _SIZE_BYTES / best_seconds(lambda: destination.copy_(source))


def read_bytes_per_s() -> float:
    values = torch.ones(_SIZE_BYTES // 4)
    return _SIZE_BYTES / best_seconds(values.sum)


def gemm_flops(dtype: torch.dtype, size: int = 1024) -> float:
    """Return the FLOP/s of a linear layer: for bf16, more processors have a fast F.linear than a fast matmul."""
    x, weight = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    return 2 * size**3 / best_seconds(lambda: F.linear(x, weight))


@dataclass(frozen=True)
class Limits:
    """Limits of a model whose every weight is read once per step and multiplied once per token."""

    read_bytes_per_s: float
    gemm_flops: float  # of bf16, or fp32 if that is faster
    weight_bytes: int  # of bf16 weights

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens * self.weight_bytes / self.gemm_flops  # 2 FLOP and 2 bytes per weight

    def step_s(self, num_rows: int) -> float:
        return max(self.weight_bytes / self.read_bytes_per_s, self.prefill_s(num_rows))

    def output_tokens_per_s(self, num_prompt: int, num_output: int, concurrency: int) -> float:
        return num_output / (self.prefill_s(num_prompt) + num_output * self.step_s(concurrency) / concurrency)


def measure(report: Report, weights: Path) -> Limits:
    """Add copy bandwidth, a read sweep and GEMM rates, with torch's default number of threads."""
    copied, read = copy_bytes_per_s(), read_bytes_per_s()
    fp32, bf16 = gemm_flops(torch.float32), gemm_flops(torch.bfloat16)
    report.add("machine: copy of 256 MiB", copied / 1e9, "GB/s")
    report.add("machine: read of 256 MiB", read / 1e9, "GB/s")
    report.add("machine: GEMM 1024, fp32", fp32 / 1e9, "GFLOP/s")
    report.add("machine: GEMM 1024, bf16", bf16 / 1e9, "GFLOP/s")
    return Limits(read, max(fp32, bf16), weights.stat().st_size)
