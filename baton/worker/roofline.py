"""What an engine's work costs, and what its device can do at best: measured once, at the worker's start, with the
threads that the engine has."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from baton.engine.engine import Engine
from baton.engine.work import Rates

_NUM_ROUNDS = 3  # the best counts: other processes start at the same time
_SIZES = {"cpu": (128 << 20, 1024), "cuda": (1 << 30, 8192)}  # bytes beyond any cache, rows of a product


class Cost:
    """Bytes and FLOPs of an engine's work, by the shapes of its model; what any kernel needs at least.

    bytes   the linear weights once a step; the KV of every sequence's context, and of what is new, once
    FLOPs   2 a weight and token (the head: a drawn row); 4 an element of a query for each position that it sees"""

    def __init__(self, engine: Engine):
        spec, layout = engine.spec, engine.layout
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        layer = spec.hidden_size * (2 * query_size + 2 * kv_size + 3 * spec.intermediate_size)
        self._token_flops = 2 * spec.num_layers * layer
        self._row_flops = 2 * spec.hidden_size * spec.vocab_size
        self._pair_flops = 4 * spec.num_layers * query_size
        self._step_bytes = engine.runner.model.weights.num_bytes
        self._token_bytes = layout.block_bytes / layout.block_size

    def bytes_per_s(self, rates: Rates) -> float:
        return rates.steps * self._step_bytes + rates.kv_tokens * self._token_bytes

    def flops_per_s(self, rates: Rates) -> float:
        return rates.tokens * self._token_flops + rates.rows * self._row_flops + rates.pairs * self._pair_flops


def full_step_s(engine: Engine, roofline: "Roofline") -> float:
    """How long the largest step would take at best."""
    one = Rates(steps=1, tokens=engine.config.max_num_batched_tokens)
    cost = Cost(engine)
    return cost.bytes_per_s(one) / roofline.bytes_per_s + cost.flops_per_s(one) / roofline.flops_per_s


class Roofline(NamedTuple):
    bytes_per_s: float
    flops_per_s: float


def measure(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Reading memory, and products of square matrices of the compute dtype. About 0.2 s."""
    num_bytes, size = _SIZES[device.type]
    values = torch.ones(num_bytes // 4, device=device)
    read_s = _best_s(values.sum, device)
    del values
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    product_s = _best_s(lambda: a @ b, device)
    return Roofline(num_bytes / read_s, 2 * size**3 / product_s)


def _best_s(action: Callable[[], object], device: torch.device) -> float:
    best_s = float("inf")
    for _ in range(1 + _NUM_ROUNDS):  # the first warms up
        begun = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - begun)
    return best_s
