"""Select the instructions for which native kernels are compiled: the best tier that the processor has, or that
BATON_ISA allows."""

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Tier:
    """Describe a set of instructions of one architecture."""

    name: str
    machine: str  # as uname reports it
    needs: frozenset[str]  # flags of /proc/cpuinfo, besides those of the architecture's lower tiers
    flags: tuple[str, ...]  # for the compiler
    features: str  # what a processor below the architecture's first tier lacks

    def __str__(self) -> str:
        return f"{self.name} ({self.features})"


TIERS = (
    Tier(
        "x86-64-v3",
        "x86_64",
        frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"]),
        ("-march=x86-64-v3",),
        "AVX2, FMA and F16C",
    ),
    Tier(
        "x86-64-v4",
        "x86_64",
        frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
        ("-march=x86-64-v4",),
        "AVX-512",
    ),
    Tier(
        "avx512-vnni",
        "x86_64",
        frozenset(["avx512_vnni"]),
        ("-march=x86-64-v4", "-mavx512vnni"),
        "AVX-512 with VNNI",
    ),
    Tier(
        "avx512-vnni-bf16",
        "x86_64",
        frozenset(["avx512_bf16"]),
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        "AVX-512 with VNNI and BF16",
    ),
    Tier(
        "avx512-amx",
        "x86_64",
        frozenset(("amx_tile", "amx_int8", "amx_bf16")),
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        "AMX tiles of int8 and bf16",
    ),
    Tier("armv8.2-dotprod", "aarch64", frozenset(["asimddp"]), ("-march=armv8.2-a+dotprod",), "NEON with dotprod"),
    Tier(
        "armv8.6-i8mm-bf16",
        "aarch64",
        frozenset(("i8mm", "bf16")),
        ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        "NEON with products of int8 matrices and of bf16",
    ),
)


def tiers_of(cpuinfo: str, machine: str) -> list[Tier]:
    """Return the tiers that a processor has, lowest first."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features")), set())
    tiers = tiers_for(machine)
    return tiers[: next((index for index, tier in enumerate(tiers) if not tier.needs <= flags), len(tiers))]


def tiers_for(machine: str) -> list[Tier]:
    """Return the tiers that an architecture may have, lowest first."""
    return [tier for tier in TIERS if tier.machine == machine]


def available() -> list[Tier]:
    """Return the tiers of this machine, lowest first, up to BATON_ISA. Raises ValueError if that is not a tier of its
    architecture."""
    machine = platform.machine()
    names = [tier.name for tier in tiers_for(machine)]
    cap = os.environ.get("BATON_ISA")
    if cap and cap not in names:
        raise ValueError(f"BATON_ISA={cap}: one of {', '.join(names)}" if names else f"BATON_ISA={cap}: no tier here")
    try:
        cpuinfo = CPUINFO.read_text()
    except OSError:
        cpuinfo = ""
    found = tiers_of(cpuinfo, machine)
    if cap:
        found = found[: names.index(cap) + 1]
    return found[:-1] if found and "amx_tile" in found[-1].needs and not tiles_permitted() else found


@cache
def tiles_permitted() -> bool:
    """Ask Linux for the AMX registers, for all threads; a process has to ask for them. Return whether it may
    use them."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def missing() -> str:
    """Return why this machine, for which none is `available`, has no tier."""
    lowest = next(iter(tiers_for(platform.machine())), None)
    return f"this processor has no {lowest}" if lowest else f"there are no kernels for {platform.machine()}"
