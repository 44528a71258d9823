"""Compile the .cpp files of this folder to one shared library. Standard library only: setup.py does it without torch.

What multiplies in parallel calls libgomp, and the library does not name it: the process has loaded torch's own before.
With a second OpenMP runtime in a process the threads of each spin while the other works; clang's, which zig would bring
along for wheels, is such a second one, so wheels are compiled by gcc too.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
# No contraction: a * b + c is two roundings in every path that computes it, so that paths can agree in every bit.
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
# gcc 12 finds uninitialized values in its own AVX-512 headers; vectors wider than a register pass between no libraries.
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi")


def find() -> list[str] | None:
    """Return CXX, else g++, its program by its path and behind it the arguments of CXX; None where this machine does
    not have it, or CXX is no command."""
    try:
        program, *arguments = shlex.split(os.environ.get("CXX") or "g++")
    except ValueError:  # blank, or a quote that does not end
        return None
    found = shutil.which(program)
    return None if found is None else [found, *arguments]


def compiled(compiler: Sequence[str], tier_flags: Sequence[str], folder: Path, link_flags: Sequence[str] = ()) -> Path:
    """Return folder/library.so, every file compiled by itself, all cores at once. Raises CalledProcessError."""

    def run(flags: Sequence[str], *arguments: str | Path) -> None:
        command = [*compiler, *flags, *tier_flags, *WARNINGS, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, text=True)

    sources = sorted(SOURCES.rglob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda source, out: run(FLAGS, "-c", source, "-o", out), sources, objects))
    without_openmp = [flag for flag in FLAGS if flag != "-fopenmp"]
    run(without_openmp, "-shared", "-Wl,--as-needed", "-o", folder / "library.so", *objects, *link_flags)
    return folder / "library.so"
