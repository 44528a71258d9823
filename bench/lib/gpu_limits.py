"""Measure this GPU's limits in the run that quotes them, and tell whether there is a GPU."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.engine.core.device import unfit
from bench.lib.report import Report

_COPY_BYTES = 4 << 30
_GEMM_SIZE = 8192
_NUM_RUNS = 20


def missing() -> str:
    """Return why nothing can be measured here; "" if there is a GPU."""
    return unfit()


def event_seconds(run: Callable[[], object], num_runs: int = _NUM_RUNS) -> float:
    """Return the median time on the device, after three warm-up runs."""
    seconds = []
    for index in range(num_runs + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if index >= 3:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


@dataclass(frozen=True)
class GpuLimits:
    """Copied bytes/s, counting reads and writes; FLOP/s of a bf16 and of an fp8 product of 8192^3."""

    bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None

    def step_s(self, num_bytes: float) -> float:
        """Return the seconds to read `num_bytes` once."""
        return num_bytes / self.bytes_per_s


def measure(report: Report) -> GpuLimits:
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    print(f"device: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * _COPY_BYTES / event_seconds(lambda: target.copy_(source))
    report.add("machine: copy of 4 GiB", copied / 1e9, "GB/s")
    a, b = (torch.randn(_GEMM_SIZE, _GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    bf16 = 2 * _GEMM_SIZE**3 / event_seconds(lambda: a @ b)
    report.add("machine: GEMM 8192, bf16", bf16 / 1e12, "TFLOP/s")
    fp8 = None
    if torch.cuda.get_device_capability() >= (8, 9):
        x, w, scale = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device=device)
        product = lambda: torch._scaled_mm(x, w, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)  # noqa: E731
        fp8 = 2 * _GEMM_SIZE**3 / event_seconds(product)
        report.add("machine: GEMM 8192, fp8", fp8 / 1e12, "TFLOP/s")
    return GpuLimits(copied, bf16, fp8)
