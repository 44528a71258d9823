"""The processor that this runs on: its name, and which instructions it has."""

import platform
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # products of bf16: x86-64, and aarch64


def name() -> str:
    """As its maker calls it."""
    found = _fields()
    return found.get("model name") or found.get("CPU part") or platform.processor() or platform.machine()


def flags() -> frozenset[str]:
    """Its instruction sets, in the kernel's words; empty where the system does not tell."""
    found = _fields()
    return frozenset((found.get("flags") or found.get("Features") or "").split())


def last_cache_bytes() -> int:
    """Return the size of the last level of its cache; 0 where the system does not tell."""
    try:
        return int(_LAST_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 0


def multiplies_bf16() -> bool:
    """Elsewhere torch widens bf16 as it goes, and is seen to take 3.5 times as long as with fp32."""
    return not flags().isdisjoint(BF16)


def compute_dtype(stored: str, why_no_kernels: str) -> str:
    """Return the dtype that `dtype auto` means for a checkpoint of this dtype, where `why_no_kernels` is why the native
    kernels are absent, or empty."""
    return "fp32" if stored == "bf16" and why_no_kernels and not multiplies_bf16() else stored


def lost(why_no_kernels: str, stored: str, compute: str) -> str:
    """Return what a start without the native kernels costs, in one line."""
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
