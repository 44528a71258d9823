"""From the .cpp files of this folder to a loaded library, cached by what went into it."""

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

SOURCES = Path(__file__).parent
# No contraction: a * b + c is two roundings in every path that computes it, so that paths can agree in every bit.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
# gcc 12 finds uninitialized values in its own AVX-512 headers.
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
# What decides which instructions -march=native means; the library is rebuilt on another machine.
CPU_FIELDS = ("vendor_id", "cpu family", "model\t", "flags")


class NativeLibrary:
    """The loaded library. `function(name, *argtypes)` is a C function that releases the GIL while it runs."""

    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))

    def function(self, name: str, *argtypes, restype=None):
        found = self._library[name]
        found.argtypes, found.restype = argtypes, restype
        return found


@cache
def _load() -> tuple[NativeLibrary | None, str]:
    if os.environ.get("BATON_NATIVE", "on") == "off":
        return None, "BATON_NATIVE=off"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None, "no C++ compiler (g++) on this machine"
    try:
        return NativeLibrary(_built(compiler)), ""
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


def _built(compiler: str) -> Path:
    sources = sorted(SOURCES.glob("*.cpp"))
    path = cache_folder() / f"native-{_digest(compiler, sources)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "native.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers start at once: one builds, the other waits
        if not path.exists():
            print("building the native kernels (once)", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                _compile(compiler, sources, Path(folder)).replace(path)
    return path


def _compile(compiler: str, sources: list[Path], folder: Path) -> Path:
    """Every file to an object, all cores at once, then all into one library."""

    def run(*arguments: str | Path) -> None:
        command = [compiler, *FLAGS, *WARNINGS, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, text=True)

    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda source, out: run("-c", source, "-o", out), sources, objects))
    run("-shared", "-Wl,--as-needed", "-o", folder / "library.so", *objects, *_openmp_of_torch())
    return folder / "library.so"


def _openmp_of_torch() -> list[Path]:
    """torch's own OpenMP runtime: with a second one in the process the threads of each spin while the other works."""
    folder = Path(torch.__file__).parent
    return sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])[:1]


def _digest(compiler: str, sources: list[Path]) -> str:
    digest = hashlib.sha256(repr((compiler, FLAGS, torch.__version__)).encode())
    for path in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        if line.startswith(CPU_FIELDS):
            digest.update(line.encode())
    return digest.hexdigest()[:16]
