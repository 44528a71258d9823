"""The activation between the two products of an MLP, kept independent of where torch divides an elementwise loop.

`F.silu` breaks batch invariance, as do all functions for which torch has vector and scalar code: both differ in the
last bit (fp32: 4 % of elements), the scalar code does the rest at the end of a loop, and a loop ends where a thread's
share ends. So rows are padded to a multiple of the vector loop's stride, and no call is divided within a row.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.model_spec import ModelSpec

VECTOR_STRIDE = 64  # elements per turn of the widest vector loop (bf16, AVX-512); rows are padded to a multiple of it
GRAIN = 32768  # elements up to which torch runs an elementwise loop on one thread

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def gated(gate_up: Tensor, name: str) -> Tensor:
    """Activate the gates and multiply: [T, 2 * size], gates first -> activated gate * up [T, size]."""
    gate, up = gate_up.chunk(2, dim=1)
    return by_rows(FUNCTIONS[name], gate).mul_(up)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate), with gates capped at `limit` and ups clamped to it; shapes as
    `gated`."""
    gate, up = gate_up.chunk(2, dim=1)
    gate = gate.clamp(max=limit)
    return by_rows(torch.sigmoid, gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit) + 1)


def make_between(spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """Return the activation between the products of a model's MLPs and experts, gated or not."""
    if not spec.gated:
        return partial(by_rows, FUNCTIONS[spec.activation])
    if spec.activation == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=spec.swiglu_alpha, limit=spec.swiglu_limit)
    return partial(gated, name=spec.activation)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return an elementwise function of x [T, size], divided between rows only."""
    if x.device.type != "cpu":  # one thread per element, nothing is divided
        return function(x)
    num_rows, size = x.shape
    if missing := -size % VECTOR_STRIDE:  # a rank's part of a row
        return by_rows(function, F.pad(x, (0, missing)))[:, :size]
    num_threads = torch.get_num_threads()
    whole = x.numel() < GRAIN or num_threads == 1
    # Equal shares of whole rows: torch uses all threads, and each gets the same number of rows.
    even = num_rows % num_threads == 0 and x.numel() > GRAIN * (num_threads - 1)
    if whole or even:
        return function(x)
    rows_per_call = max(1, (GRAIN - 1) // size)
    return torch.cat([function(rows) for rows in x.split(rows_per_call)])


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) of x [T, size], for any size."""
    return by_rows(torch.tanh, x / cap) * cap
