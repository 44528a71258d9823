"""Measure the peak of this machine's multipliers (peak.cpp, compiled on demand)."""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from baton.engine.native import compiler
from baton.engine.native.tier import available

SOURCE = Path(__file__).with_name("peak.cpp")


@dataclass(frozen=True)
class Peak:
    """Operations per second on registers alone, counting a product and a sum as two, and the instructions that reach
    it."""

    floats: float
    ints: float
    float_instruction: str
    int_instruction: str


def measure(num_threads: int) -> Peak | None:
    """Measure with the instructions of the best tier, which BATON_ISA limits. None without a compiler, and below
    AVX2."""
    found, tiers = compiler.find(), available()
    if found is None or not tiers:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        command = [*found, "-O2", "-std=c++17", *tiers[-1].flags, "-pthread", SOURCE, "-o", program]
        subprocess.run(command, check=True)
        ran = subprocess.run([program, str(num_threads)], check=True, capture_output=True, text=True)
    if not ran.stdout:
        return None
    has_vnni = "-mavx512vnni" in tiers[-1].flags  # also for AMX, whose tiles are not measured
    names = ("vdpbf16ps", "vpdpbusd") if has_vnni else ("vfmadd231ps", "vpmaddwd and vpaddd")
    return Peak(*map(float, ran.stdout.split()), *names)
