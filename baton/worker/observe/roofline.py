"""Compute the cost of an engine's work, and measure the best rates of its device. They are measured at the worker's
start, with the engine's kernel and its largest number of threads, and kept for later starts on this machine."""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core import cpu
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.layers.linear import choose
from baton.engine.native.build import cache_folder
from baton.engine.step_work import WorkRates
from baton.engine.weights.forms import DenseWeight

_READ_S, _MULTIPLY_S = 0.04, 0.06  # filling the memory before reading takes 0.03 to 0.1 s more
# Each start measures again until 3 in a row find nothing 1.1 times better, since other processes may be starting too.
_NUM_STARTS, _BETTER = 3, 1.1
_MIN_SIZE, _GROWTH = 256, 2  # size of the first product, and its growth; time grows by the cube of it
_MAX_SIZE = {"cpu": 1024, "cuda": 8192}
_CUDA_BYTES = 256 << 20  # beyond any cache: 126 MB in a B200

log = logging.getLogger(__name__)

Product = Callable[[int], Callable[[], object]]  # from the size of square matrices to their product, ready to run


class Cost:
    """Compute the least bytes and FLOPs that any kernel needs for an engine's work, from the shapes of its model.

    bytes   per step: the linear weights once (of experts, those that tokens choose, at most all); the KV of every
            sequence's context and new tokens once; every sequence's state read and written once
    FLOPs   2 per weight and token (for the head: per drawn row); 4 per element of a query and position that it sees"""

    def __init__(self, engine: Engine):
        spec, layout = engine.spec, engine.layout
        query_size = spec.num_heads * spec.head_dim
        self._token_flops = 2 * spec.num_layer_weights(chosen_only=True)
        self._row_flops = 2 * spec.hidden_size * spec.vocab_size
        self._pair_flops = 4 * len(spec.kv_layers) * query_size
        num_bytes = engine.runner.model.weights.num_bytes
        per_weight = num_bytes / (spec.num_layer_weights() + spec.hidden_size * spec.vocab_size)
        self._expert_bytes = per_weight * spec.num_expert_weights()
        self._chosen_bytes = per_weight * spec.num_expert_weights(chosen_only=True)  # by one token
        self._step_bytes = num_bytes - self._expert_bytes
        self._token_bytes = layout.block_bytes / layout.block_size
        self._state_bytes = 2 * layout.state_bytes

    def bytes_per_s(self, rates: WorkRates) -> float:
        experts = min(rates.tokens * self._chosen_bytes, rates.steps * self._expert_bytes)
        return (
            rates.steps * self._step_bytes
            + experts
            + rates.kv_tokens * self._token_bytes
            + rates.rows * self._state_bytes
        )

    def flops_per_s(self, rates: WorkRates) -> float:
        return rates.tokens * self._token_flops + rates.rows * self._row_flops + rates.pairs * self._pair_flops


def full_step_s(engine: Engine, roofline: "Roofline") -> float:
    """Return the least seconds that the largest step can take."""
    one = WorkRates(steps=1, tokens=engine.config.max_num_batched_tokens)
    cost = Cost(engine)
    return cost.bytes_per_s(one) / roofline.bytes_per_s + cost.flops_per_s(one) / roofline.flops_per_s


class Roofline(NamedTuple):
    """The best rates of a device."""

    bytes_per_s: float
    flops_per_s: float


def of_engine(engine: Engine) -> Roofline | None:
    """Return the best rates that starts on this machine have measured, and measure again while better ones are found.
    None if a GPU has no memory left for it."""
    model, config = engine.runner.model, engine.config
    threads = engine.runner.threads.most
    torch.set_num_threads(threads)
    cache = Cache(
        cache_folder(), (_device_name(model.device), threads, torch.__version__, config.dtype, model.head.name)
    )
    try:
        return cache.best_of(lambda: measure(model.device, _product(config, model.device, model.dtype)))
    except torch.cuda.OutOfMemoryError:
        log.warning("there is no baton_utilisation: the GPU has no %d MiB left to measure its rates", _CUDA_BYTES >> 20)
        return None
    finally:
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


class Cache:
    """Keep a roofline in a file of `folder`, for engines with the same `key`. If it cannot be written, nothing is
    kept."""

    def __init__(self, folder: Path, key: tuple):
        self._path = folder / f"roofline-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"

    def best_of(self, measure: Callable[[], Roofline]) -> Roofline:
        num_starts, best = self._read()
        if num_starts < _NUM_STARTS:
            found = measure()
            is_better = any(new > _BETTER * old for new, old in zip(found, best, strict=True))
            best = Roofline(*map(max, found, best))
            self._write(0 if is_better else num_starts + 1, best)
        return best

    def _read(self) -> tuple[int, Roofline]:
        try:
            found = json.loads(self._path.read_text())
            return int(found["starts_since"]), Roofline(float(found["bytes_per_s"]), float(found["flops_per_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            return 0, Roofline(0.0, 0.0)

    def _write(self, num_starts: int, best: Roofline) -> None:
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"starts_since": num_starts, **best._asdict()}))
            part.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()


def measure(device: torch.device, product: Product, now: Callable[[], float] = time.perf_counter) -> Roofline:
    """Measure reading memory and multiplying square matrices, each for a fixed time."""
    timer = Timer(device, now)
    values = torch.ones(_CUDA_BYTES if device.type == "cuda" else _uncached_bytes(), dtype=torch.uint8, device=device)
    read_s = timer.best_s(values.view(torch.float32).sum, now() + _READ_S)
    flops_per_s = timer.best_flops_per_s(product, _MAX_SIZE[device.type], now() + _MULTIPLY_S)
    return Roofline(values.nbytes / read_s, flops_per_s)


class Timer:
    """Measure the best times of actions on a device."""

    def __init__(self, device: torch.device, now: Callable[[], float]):
        self._device, self._now = device, now

    def best_s(self, action: Callable[[], object], deadline: float) -> float:
        """Return the best time of at least two runs; the first one warms up."""
        best_s = self._once(action)
        while True:
            best_s = min(best_s, self._once(action))
            if self._now() >= deadline:
                return best_s

    def best_flops_per_s(self, product: Product, max_size: int, deadline: float) -> float:
        """Return the best rate of the smallest product, and of larger ones while there is time, because they use more
        threads."""
        size, best = _MIN_SIZE, 0.0
        while True:
            begun = self._now()
            seconds = self.best_s(product(size), begun)
            best = max(best, 2 * size**3 / seconds)
            taken_s, left_s = self._now() - begun, deadline - self._now()
            if size < max_size and left_s > taken_s * _GROWTH**3:
                size *= _GROWTH
            elif left_s < taken_s:
                return best

    def _once(self, action: Callable[[], object]) -> float:
        begun = self._now()
        action()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now() - begun


def _product(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Product:
    """Return products by the kernel of the engine's weights in this dtype; on a GPU by torch's, which is best there."""

    def ready(size: int) -> Callable[[], Tensor]:
        x, weight = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        if device.type == "cuda":
            return lambda: F.linear(x, weight)
        make, _ = choose(config.linear, config.batch_invariant, dtype)
        kernel = make(DenseWeight(weight))
        return lambda: kernel(x)

    return ready


def _uncached_bytes() -> int:
    """Return twice the size of the processor's last cache, within bounds, since touching memory first takes 1 ms per
    MiB."""
    return min(max(2 * cpu.last_cache_bytes(), 64 << 20), 128 << 20)


def _device_name(device: torch.device) -> str:
    """Return a name that equal devices share."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return " ".join((cpu.name(), *sorted(cpu.flags())))
