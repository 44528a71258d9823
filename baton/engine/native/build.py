"""Load the library of one tier: the one in the wheel, or else one compiled here and cached by a digest of its
inputs."""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from baton import system
from baton.engine.native import compiler
from baton.engine.native.tier import Tier, available, missing

SHIPPED = compiler.SOURCES / "libraries"  # in a wheel: one for each tier of its architecture
_DIGEST_BYTES = hashlib.sha256().digest_size


class NativeLibrary:
    """Hold the loaded library. `function(name, *argtypes)` returns a C function that releases the GIL while it runs."""

    def __init__(self, path: Path, tier: Tier):
        self.path, self.tier = path, tier
        ctypes.CDLL(_openmp_of_torch(), mode=ctypes.RTLD_GLOBAL)  # the library calls it
        self._library = ctypes.CDLL(str(path))

    def function(self, name: str, *argtypes, restype=None):
        """Return a C function of the library with these argument types."""
        found = self._library[name]
        found.argtypes, found.restype = argtypes, restype
        return found

    @property
    def products(self) -> str:
        """Return how the tier's kernels multiply floating point: tiers with equal names give the same bits."""
        return self.function("baton_products", restype=ctypes.c_char_p)().decode()


@cache
def _load() -> tuple[NativeLibrary | None, str]:
    if os.environ.get("BATON_NATIVE", "on") == "off":
        return None, "BATON_NATIVE=off"
    tiers = available()
    if not tiers:
        return None, missing()
    tier = tiers[-1]
    path = SHIPPED / f"{tier.name}.so"
    try:
        if not path.exists():
            if (found := compiler.find()) is None:
                return None, f"no C++ compiler ({os.environ.get('CXX') or 'g++'}) on this machine"
            path = built(found, tier)
        return NativeLibrary(path, tier), ""
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        lines = detail.strip().splitlines() or [str(error)]
        message = next((line for line in lines if " error: " in line), lines[0])
        cure = "; BATON_CACHE=DIR names a folder that can be written" if getattr(error, "filename", None) else ""
        return None, f"the C++ kernels did not build: {message}{cure}"


def library() -> NativeLibrary | None:
    """Return the library of this machine, built once and cached on disk; None if there is none."""
    return _load()[0]


def unavailable() -> str:
    """Return why there is no library; "" if there is one."""
    return _load()[1]


def cache_folder() -> Path:
    """Return BATON_CACHE, or else the user's cache folder."""
    root = os.environ.get("BATON_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "baton")
    return system.with_home(root)


def built(command: Sequence[str], tier: Tier) -> Path:
    """Return the library of a tier, compiled by this command if it is not in the cache."""
    path = cache_folder() / f"native-{tier.name}-{_digest(command, tier)}.so"
    if _is_whole(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:  # if two workers start together, one builds and the other waits
        is_alone = _lock(lock, tier)
        if not _is_whole(path):
            print(f"starting: building the native kernels for {tier.name} (once)", file=sys.stderr, flush=True)
            # The host's own folder: hosts may share the cache on a disk that does not share locks.
            builder = os.uname().nodename + ("" if is_alone else f"-{os.getpid()}")
            folder = path.with_suffix(f".{builder}.build")
            shutil.rmtree(folder, ignore_errors=True)  # of a build that was killed
            folder.mkdir()
            try:
                library = compiler.compiled(command, tier.flags, folder)
                _finish(library)
                library.replace(path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return path


def _lock(file: IO[str], tier: Tier) -> bool:
    """Wait for the lock of a tier's build, and return True; False on a disk that has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits_for = f"another process, which builds the native kernels for {tier.name} ({file.name})"
        print(f"starting: waiting for {waits_for}", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _finish(library: Path) -> None:
    """Append the digest of the file's bytes, where no loader looks, and wait until the disk has both."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Return whether the cached file is complete: calling a truncated one, as an interrupted copy leaves it, raises
    SIGBUS."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return False
    return found[-_DIGEST_BYTES:] == hashlib.sha256(found[:-_DIGEST_BYTES]).digest()


def _openmp_of_torch() -> str:
    """Return the OpenMP runtime that torch has loaded: its own, or the system's if a distribution built torch."""
    import torch  # imported late: a look at the tiers does not wait for it

    folder = Path(torch.__file__).parent
    found = sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])
    return str(found[0]) if found else "libgomp.so.1"


def _digest(command: Sequence[str], tier: Tier) -> str:
    inputs = (*command, compiler.version(command), platform.libc_ver(), compiler.FLAGS, tier.flags)
    digest = hashlib.sha256(repr(inputs).encode())
    sources = compiler.SOURCES
    for path in sorted((*sources.rglob("*.cpp"), *sources.rglob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
