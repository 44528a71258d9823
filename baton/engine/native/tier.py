"""Which instructions the native kernels are compiled for: the best tier that the processor has, or that BATON_ISA allows."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tier:
    """A set of instructions."""

    name: str
    needs: frozenset[str]  # of /proc/cpuinfo, besides those of the tiers before it
    flags: tuple[str, ...]  # of the compiler


TIERS = (
    Tier("x86-64-v3", frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"]), ("-march=x86-64-v3",)),
    Tier("x86-64-v4", frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]), ("-march=x86-64-v4",)),
    Tier(
        "avx512-vnni-bf16",
        frozenset(("avx512_vnni", "avx512_bf16")),
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    ),
)


def tiers_of(cpuinfo: str) -> list[Tier]:
    """Those that a processor has, worst first."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(value.split()) for name, _, value in lines if name.strip() == "flags"), set())
    count = next((index for index, tier in enumerate(TIERS) if not tier.needs <= flags), len(TIERS))
    return list(TIERS[:count])


def available() -> list[Tier]:
    """Those of this machine, worst first, up to BATON_ISA. Raises ValueError where that names no tier."""
    names = [tier.name for tier in TIERS]
    cap = os.environ.get("BATON_ISA") or names[-1]
    if cap not in names:
        raise ValueError(f"BATON_ISA={cap}: one of {', '.join(names)}")
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    return tiers_of(cpuinfo)[: names.index(cap) + 1]
