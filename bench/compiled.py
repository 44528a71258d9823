"""Compare torch.compile's linear kernels with ours in C++: python bench/compiled.py [--quick] [--json FILE].

Measured is a matrix times a vector, as in decoding one sequence. Nothing holds generated code to one order of sums for
one row and for many, which the exact mode needs in addition."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.layers.linear import choose
from baton.engine.weights.forms import DenseWeight, IntWeight, Weight
from bench.lib import limits
from bench.lib.report import Report, finish, start

NUM_OUT, NUM_IN, GROUP = 32768, 4096, 32  # larger than any cache, at 4 bits too
NUM_THREADS = 2


def bf16(values: Tensor, x: Tensor) -> Tensor:
    return (values.float() * x.float()).sum(1)


def int4(values: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    """Multiply `values` uint8 [out, in / 2], biased by 8 with the even input in the low half, and scales fp32 [out,
    groups] by x."""
    even, odd = (part.unflatten(0, (-1, GROUP // 2)).float() for part in (x[0::2], x[1::2]))
    pairs = values.unflatten(1, (-1, GROUP // 2))
    sums = ((pairs & 15).float() - 8) * even + ((pairs >> 4).float() - 8) * odd
    return (sums.sum(2) * scales).sum(1)


def row(report: Report, name: str, weight: Weight, function: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Add a row in GB/s of the bytes that our weight holds; `function` of `tensors` and the vector computes the
    same."""
    make, _ = choose("auto", True, torch.bfloat16)
    ours, x = make(weight, None), torch.randn(NUM_IN).bfloat16()
    compiled = torch.compile(function)
    found, own = (limits.best_seconds(run) for run in (lambda: compiled(*tensors, x), lambda: ours(x.unsqueeze(0))))
    read = ours.num_bytes / 1e9
    report.add(f"{name}, matrix times vector: torch.compile over ours", read / found, "GB/s", against=read / own)


def main() -> int:
    arguments, report = start("compiled", "A matrix times a vector: torch.compile against the C++ kernels.")
    torch.set_num_threads(NUM_THREADS)
    num_out = NUM_OUT // 4 if arguments.quick else NUM_OUT
    dense = torch.randn(num_out, NUM_IN, dtype=torch.bfloat16)
    row(report, "bf16", DenseWeight(dense), bf16, dense)
    packed = torch.randint(0, 256, (num_out, NUM_IN // 2), dtype=torch.uint8)
    scales = torch.rand(num_out, NUM_IN // GROUP).half().float()
    row(report, "int4-g32", IntWeight(4, packed, scales, GROUP), int4, packed, scales)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
