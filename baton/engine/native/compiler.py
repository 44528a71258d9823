"""Compile the .cpp files of this folder to one shared library. Standard library only, so that setup.py needs no torch.

Parallel products call libgomp, which the library does not link, since the process has loaded torch's own before. With a
second OpenMP runtime in a process the threads of each spin while the other works. clang's runtime, which zig would
bring for wheels, would be a second one, so wheels are compiled by gcc too.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
# No contraction: a * b + c rounds twice in every path that computes it, so that paths can agree in every bit.
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
# gcc 12 finds uninitialized values in its own AVX-512 headers; vectors wider than a register never pass between
# libraries.
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi")


def find() -> list[str] | None:
    """Return the compiler command: CXX, or else g++, as the program's path and the arguments of CXX. None if this
    machine does not have it, or if CXX is not a command."""
    try:
        program, *arguments = shlex.split(os.environ.get("CXX") or "g++")
    except ValueError:  # blank, or a quote that is not closed
        return None
    found = shutil.which(program)
    return None if found is None else [found, *arguments]


def version(compiler: Sequence[str]) -> str:
    """Return what the compiler calls itself, "" where it does not say."""
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""


def compiled(compiler: Sequence[str], tier_flags: Sequence[str], folder: Path, link_flags: Sequence[str] = ()) -> Path:
    """Return folder/library.so, compiled file by file on all cores. Raises CalledProcessError."""

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
