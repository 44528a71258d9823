"""Describe the processor of this host: its name, its instruction sets and its cache."""

import platform
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # products of bf16: x86-64, and aarch64


def name() -> str:
    """Return the processor's name."""
    found = _fields()
    return found.get("model name") or found.get("CPU part") or platform.processor() or platform.machine()


def flags() -> frozenset[str]:
    """Return its instruction sets as Linux names them; empty if the system does not say."""
    found = _fields()
    return frozenset((found.get("flags") or found.get("Features") or "").split())


def last_cache_bytes() -> int:
    """Return the size of its last-level cache, or 0 if the system does not say."""
    try:
        return int(_LAST_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 0


def multiplies_bf16() -> bool:
    """Return whether it has instructions for products of bf16. Without them torch takes 3.5 times as long as in
    fp32."""
    return not flags().isdisjoint(BF16)


def compute_dtype(stored: str, why_no_kernels: str) -> str:
    """Return the dtype that `dtype auto` means for a checkpoint of dtype `stored`.

    `why_no_kernels` says why the native kernels are absent; empty if they are there.
    """
    return "fp32" if stored == "bf16" and why_no_kernels and not multiplies_bf16() else stored


def lost(why_no_kernels: str, stored: str, compute: str) -> str:
    """Describe in one line what a start without the native kernels costs."""
    wide = ", weights and KV take twice their memory" if (stored, compute) == ("bf16", "fp32") else ""
    cure = "; install g++ and start again" if "no C++ compiler" in why_no_kernels else ""
    return (
        f"no native kernels: {why_no_kernels}. torch computes, in {compute}: several times slower, "
        f"quantized weights but int8 by row are expanded{wide}{cure}"
    )


@cache
def _fields() -> dict[str, str]:
    """Read the fields of the first processor from /proc/cpuinfo."""
    try:
        lines = CPUINFO.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
