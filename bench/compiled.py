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
from bench.lib.report import Report, finish, interleave, start

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


def compare(
    report: Report, num_rounds: int, name: str, weight: Weight, function: Callable[..., Tensor], *tensors: Tensor
) -> None:
    """Add rows in GB/s of the bytes that our weight holds; `function` of `tensors` and the vector computes the same."""
    make, _ = choose("auto", True, torch.bfloat16)
    ours, x = make(weight, None), torch.randn(NUM_IN).bfloat16()
    compiled = torch.compile(function)
    arms = {"compiled": lambda: compiled(*tensors, x)} | dict.fromkeys(("ours", "A/A"), lambda: ours(x.unsqueeze(0)))
    seconds = interleave({arm: lambda run=run: limits.best_seconds(run, 1) for arm, run in arms.items()}, num_rounds)
    rates = {arm: ours.num_bytes / 1e9 / min(each) for arm, each in seconds.items()}
    row = f"{name}, matrix times vector"
    report.add(f"{row}: torch.compile over ours", rates["compiled"], "GB/s", against=rates["ours"])
    report.add(f"{row}: A/A, ours over ours", rates["A/A"], "GB/s", against=rates["ours"])


def main() -> int:
    arguments, report = start("compiled", "A matrix times a vector: torch.compile against the C++ kernels.")
    torch.set_num_threads(NUM_THREADS)
    num_out = NUM_OUT // 4 if arguments.quick else NUM_OUT
    dense = torch.randn(num_out, NUM_IN, dtype=torch.bfloat16)
    num_rounds = 3 if arguments.quick else 9
    compare(report, num_rounds, "bf16", DenseWeight(dense), bf16, dense)
    packed = torch.randint(0, 256, (num_out, NUM_IN // 2), dtype=torch.uint8)
    scales = torch.rand(num_out, NUM_IN // GROUP).half().float()
    compare(report, num_rounds, "int4-g32", IntWeight(4, packed, scales, GROUP), int4, packed, scales)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
