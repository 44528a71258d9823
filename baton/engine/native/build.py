"""From the .cpp files of this folder to a loaded library of one tier, cached by what went into it."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from baton.engine.native.tier import Tier, available, missing

SOURCES = Path(__file__).parent
# No contraction: a * b + c is two roundings in every path that computes it, so that paths can agree in every bit.
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
# gcc 12 finds uninitialized values in its own AVX-512 headers; vectors wider than a register pass between no libraries.
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi")


class NativeLibrary:
    """The loaded library. `function(name, *argtypes)` is a C function that releases the GIL while it runs."""

    def __init__(self, path: Path, tier: Tier):
        self.path, self.tier = path, tier
        self._library = ctypes.CDLL(str(path))

    def function(self, name: str, *argtypes, restype=None):
        found = self._library[name]
        found.argtypes, found.restype = argtypes, restype
        return found

    @property
    def products(self) -> str:
        """How its kernels multiply floating point: tiers that do it alike give the same bits."""
        return self.function("baton_products", restype=ctypes.c_char_p)().decode()


@cache
def _load() -> tuple[NativeLibrary | None, str]:
    if os.environ.get("BATON_NATIVE", "on") == "off":
        return None, "BATON_NATIVE=off"
    tiers = available()
    if not tiers:
        return None, missing()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None, "no C++ compiler (g++) on this machine"
    try:
        return NativeLibrary(built(compiler, tiers[-1]), tiers[-1]), ""
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        lines = detail.strip().splitlines()
        return None, f"the C++ kernels did not build: {next((line for line in lines if ' error: ' in line), lines[0])}"


def library() -> NativeLibrary | None:
    """The library of this machine, built once and cached on disk; None where it cannot be had."""
    return _load()[0]


def reason() -> str:
    """Why there is no library; empty when there is one."""
    return _load()[1]


def cache_folder() -> Path:
    """BATON_CACHE, else the user's cache folder."""
    root = os.environ.get("BATON_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "baton")
    return Path(root).expanduser()


def built(compiler: str, tier: Tier) -> Path:
    """The library of a tier, compiled where the cache has none."""
    path = cache_folder() / f"native-{tier.name}-{_digest(compiler, tier)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "native.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers start at once: one builds, the other waits
        if not path.exists():
            print(f"starting: building the native kernels for {tier.name} (once)", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                compiled(compiler, tier, Path(folder), _openmp_of_torch()).replace(path)
    return path


def compiled(compiler: str, tier: Tier, folder: Path, openmp: list[Path]) -> Path:
    """Every file to an object, all cores at once, then all into one library, with this OpenMP runtime or the compiler's."""

    def run(*arguments: str | Path) -> None:
        command = [compiler, *FLAGS, *tier.flags, *WARNINGS, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, text=True)

    sources = sorted(SOURCES.rglob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda source, out: run("-c", source, "-o", out), sources, objects))
    run("-shared", "-Wl,--as-needed", "-o", folder / "library.so", *objects, *openmp)
    return folder / "library.so"


def _openmp_of_torch() -> list[Path]:
    """torch's own OpenMP runtime: with a second one in the process the threads of each spin while the other works."""
    folder = Path(torch.__file__).parent
    return sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])[:1]


def _digest(compiler: str, tier: Tier) -> str:
    digest = hashlib.sha256(repr((compiler, FLAGS, tier.flags, torch.__version__)).encode())
    for path in sorted((*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
