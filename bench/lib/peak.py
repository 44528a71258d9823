"""Measure the peak of this machine's multipliers (peak.cpp, compiled when it is needed)."""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("peak.cpp")


@dataclass(frozen=True)
class Peak:
    """Operations a second, a product and a sum counted as two."""

    bf16: float
    int8: float


def measure(num_threads: int) -> Peak | None:
    """None without a compiler, or where the processor has no AVX-512 BF16 and VNNI."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        command = [compiler, "-O2", "-std=c++17", "-march=native", "-pthread", SOURCE, "-o", program]
        subprocess.run(command, check=True)
        ran = subprocess.run([program, str(num_threads)], check=True, capture_output=True, text=True)
    return Peak(*map(float, ran.stdout.split())) if ran.stdout else None
