"""Devices that plans know: GPUs by their makers' figures, and this machine's CPU by measurement."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton import system
from baton.engine import native
from baton.engine.core import cpu
from baton.engine.core.device import product_dtype
from baton.planning.efficiency import Efficiencies

GB = 10**9
# memory is measured over this many times the cache, so that little is found in it
_LEAST_READ_BYTES, CACHES_READ = 64 << 20, 4
_CACHED_BYTES = 4 << 20
_SIZE = 512  # rows and columns of the measured product
_NUM_ROUNDS = 5


@dataclass(frozen=True)
class Device:
    """Rates of one device, as one worker has them. `flops_per_s` is by compute form; `link_bytes_per_s` is between two
    workers. `cores` are those of the host, which workers and gateway share; None if it has enough. `cache_bytes` is the
    last-level cache: a step reads what fits there at the cache's rate; 0 if nothing stays there between steps."""

    name: str
    kind: str  # cuda | cpu
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: dict[str, float] = field(hash=False)
    link_bytes_per_s: float
    cores: int | None = None
    threads: int = 1
    cache_bytes: int = 0
    cache_bytes_per_s: float = 0.0


def _gpu(
    name: str, gib: int, gb_per_s: int, fp32: float, bf16: int, eight_bit: int | None, link_gb_per_s: int
) -> Device:
    """Return a GPU from its maker's data sheet, in dense TFLOP/s. `eight_bit` None: 8-bit weights are computed in
    bf16."""
    flops = {"fp32": fp32 * 1e12, "bf16": bf16 * 1e12, "int8": (eight_bit or bf16) * 1e12}
    flops |= {"fp8": eight_bit * 1e12} if eight_bit else {}
    return Device(name, "cuda", gib << 30, gb_per_s * GB, flops, link_gb_per_s * GB)


# GiB: about what torch reports, which is less than the nominal size. Rates are dense, without sparsity. Links: one
# direction between two workers, over NVLink if there is one, else PCIe.
GPUS = {
    device.name: device
    for device in (
        _gpu("H100", 79, 3350, 67, 989, 1979, 450),
        _gpu("H200", 139, 4800, 67, 989, 1979, 450),
        _gpu("B200", 178, 8000, 80, 2250, 4500, 900),
        _gpu("A100", 79, 2039, 19.5, 312, None, 300),
        _gpu("L40S", 44, 864, 91.6, 362, 733, 32),
        _gpu("RTX4090", 23, 1008, 82.6, 165, 330, 32),
    )
}


def find_device(name: str) -> Device | None:
    """Return the GPU of this name; None for `cpu`, this machine's CPU. Raises ValueError."""
    if name == "cpu":
        return None
    wanted = name.replace(" ", "").replace("-", "").upper()
    for known, device in GPUS.items():
        if known == wanted:
            return device
    raise ValueError(f"device {name!r}: one of cpu, {', '.join(GPUS)}")


def this_cpu(threads: int, known: Efficiencies | None = None) -> Device:
    """Return this machine's CPU for workers with `threads` each. Its rates are those of `known` if they were measured
    on such a CPU, since efficiencies are shares of them; otherwise they are measured now."""
    name = f"{cpu.name()}, {instruction_set()}"
    if known is not None and known.name == name:
        rates = Rates(known.bytes_per_s, known.cache_bytes_per_s, known.flops_per_s * threads / known.threads)
    else:
        rates = measure_rates(threads)
    forms: dict[str, float] = dict.fromkeys(("fp32", "bf16", "int8"), rates.flops_per_s)
    if product_dtype() == torch.bfloat16:  # the measured rate is that of bf16
        forms["fp32"] /= 2  # half as many fit into a vector
    return Device(
        name,
        "cpu",
        system.memory_limit(),
        rates.bytes_per_s,
        forms,
        2.0 * GB,
        system.num_cores(),
        threads,
        cpu.last_cache_bytes(),
        rates.cache_bytes_per_s,
    )


def instruction_set() -> str:
    """Return the instruction set with which the native kernels multiply here."""
    library = native.library()
    return torch.backends.cpu.get_cpu_capability().lower() if library is None else library.products


class Rates(NamedTuple):
    """Bytes per second that some threads read from memory and from cache, and their FLOP/s in the dtype that the CPU
    multiplies fastest."""

    bytes_per_s: float
    cache_bytes_per_s: float
    flops_per_s: float


def measure_rates(threads: int) -> Rates:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.ones(max(_LEAST_READ_BYTES, CACHES_READ * cpu.last_cache_bytes()) // 4)
        cached = values[: _CACHED_BYTES // 4]
        x, weight = (torch.ones(_SIZE, _SIZE, dtype=product_dtype()) for _ in range(2))
        read_s, cached_s = _best_s(values.sum), _best_s(cached.sum)
        product_s = _best_s(lambda: F.linear(x, weight))
    finally:
        torch.set_num_threads(before)
    return Rates(4 * values.numel() / read_s, _CACHED_BYTES / cached_s, 2 * _SIZE**3 / product_s)


def _best_s(action: Callable[[], object]) -> float:
    """Return the shortest time of a few runs after a warm-up."""
    action()
    best = float("inf")
    for _ in range(_NUM_ROUNDS):
        begun = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begun)
    return best
