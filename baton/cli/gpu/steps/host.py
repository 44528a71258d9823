"""Step 1: check driver and torch, each GPU and which processes hold its memory, and what Triton needs to compile."""

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from baton import system
from baton.cli.gpu.check import Say
from baton.engine.core.config import MIN_CAPABILITY
from kvtransfer.memory.cuda_runtime import find_runtime, gpu_refusal

MIN_FREE = 0.5  # of a GPU's memory
MIN_SHM_BYTES = 64 << 20
MIN_SHM_BYTES_OF_RANKS = 1 << 30  # NCCL sums through it if GPUs cannot access each other
_FIELDS = (
    "index", "name", "driver_version", "compute_cap", "memory.total", "memory.free", "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown", "pci.bus_id",
)  # fmt: skip


class Probe:
    """Reads the state of this machine, as this process sees it."""

    def smi(self, *arguments: str) -> list[list[str]] | None:
        """Return the rows of nvidia-smi; None if it is not installed."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return None
        argv = [program, *arguments, "--format=csv,noheader,nounits"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10)
        return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]

    def driver_refusal(self) -> str:
        return gpu_refusal()

    def bus_ids(self) -> list[str]:
        """Return the PCI addresses of the GPUs that this process may use."""
        runtime = find_runtime()
        return [] if runtime is None else [runtime.pci_id(device) for device in range(runtime.num_devices())]

    def has_module(self, name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    def program(self, name: str) -> str | None:
        return shutil.which(name)

    def header(self) -> Path:
        return Path(sysconfig.get_paths()["include"]) / "Python.h"

    def libcuda(self) -> str | None:
        return os.environ.get("TRITON_LIBCUDA_PATH") or ctypes.util.find_library("cuda")

    def cache(self) -> Path:
        return Path(os.environ.get("TRITON_CACHE_DIR") or system.with_home("~/.triton"))

    def shm_bytes(self) -> int:
        return shutil.disk_usage("/dev/shm").total

    def numa_node(self, bus_id: str) -> int:
        """Return the NUMA node of a GPU; -1 if the machine has only one or does not tell."""
        try:
            return int(Path(f"/sys/bus/pci/devices/{_short(bus_id)}/numa_node").read_text())
        except (OSError, ValueError):
            return -1


def check(say: Say, model: Path | None, probe: Probe | None = None) -> None:
    probe = probe or Probe()
    why = probe.driver_refusal()
    say("driver and torch", not why, why or "the driver serves the CUDA that torch is built for")
    _gpus(say, probe)
    _compiling(say, probe)
    _shared(say, probe)


def _short(bus_id: str) -> str:
    """Return a PCI address as the kernel writes it, with four digits of domain; nvidia-smi writes eight."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _gpus(say: Say, probe: Probe) -> None:
    """Check the GPUs that this process may use; all GPUs if it may use none."""
    rows = probe.smi(f"--query-gpu={','.join(_FIELDS)}")
    if rows is None:
        say("GPUs", None, "nvidia-smi is not here: memory, MIG, ECC and throttling were not looked at")
        return
    usable = {_short(bus_id) for bus_id in probe.bus_ids()}
    for row in rows:
        if len(row) != len(_FIELDS):
            say("GPUs", None, f"nvidia-smi says: {' '.join(row)}")
            continue
        found = dict(zip(_FIELDS, row, strict=True))
        if usable and _short(found["pci.bus_id"]) not in usable:
            continue
        name = f"GPU {found['index']}"
        capability = tuple(int(part) for part in found["compute_cap"].split("."))
        say(
            name,
            capability >= MIN_CAPABILITY,
            f"{found['name']}, compute capability {found['compute_cap']}, "
            f"driver {found['driver_version']}, NUMA node {probe.numa_node(found['pci.bus_id'])}",
        )
        _memory(say, f"{name}: memory", found["memory.free"], found["memory.total"])
        is_split = found["mig.mode.current"] == "Enabled"
        say(
            f"{name}: MIG",
            None if is_split else True,
            "on: copies between two instances are refused, KV goes through host memory" if is_split else "off",
        )
        errors = found["ecc.errors.uncorrected.volatile.total"]
        say(f"{name}: ECC", errors == "0" or not errors.isdigit(), f"uncorrected errors: {errors}")
        slowed = found["clocks_throttle_reasons.hw_slowdown"]
        say(f"{name}: clocks", slowed != "Active", "slowed down by heat or power" if slowed == "Active" else "free")
    for pid, memory, process in probe.smi("--query-compute-apps=pid,used_memory,process_name") or ():
        say("holds memory", None, f"process {pid}, {process}: {memory} MiB")


def _memory(say: Say, name: str, free: str, total: str) -> None:
    """Report free and total memory (MiB). They are not numbers if nvidia-smi may not tell, or the GPU has no memory of
    its own."""
    if not (free.isdigit() and total.isdigit()):
        say(name, None, f"nvidia-smi says {total}")
        return
    free_gib, total_gib = int(free) / 1024, int(total) / 1024
    say(name, free_gib >= MIN_FREE * total_gib, f"{free_gib:.1f} GiB free of {total_gib:.1f}")


def _compiling(say: Say, probe: Probe) -> None:
    """Check what Triton needs: the package, a C compiler, Python's headers, libcuda, and a folder for compiled
    kernels."""
    has_triton = probe.has_module("triton")
    say("triton", has_triton, "installed" if has_triton else "pip install triton")
    compiler = probe.program("gcc") or probe.program("cc") or probe.program("clang")
    say("C compiler", compiler is not None, compiler or "Triton builds its launchers with one: install gcc")
    header = probe.header()
    say("Python.h", header.exists(), str(header) if header.exists() else f"{header} is missing: install python3-dev")
    libcuda = probe.libcuda()
    say(
        "libcuda",
        libcuda is not None,
        libcuda or "ldconfig knows none: run ldconfig, or set TRITON_LIBCUDA_PATH to its folder",
    )
    cache = probe.cache()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    is_writable = os.access(nearest, os.W_OK)
    say(
        "kernel cache", is_writable, f"{cache}{'' if is_writable else ' cannot be written: every start compiles again'}"
    )


def _shared(say: Say, probe: Probe) -> None:
    num_bytes, least = probe.shm_bytes(), MIN_SHM_BYTES if len(probe.bus_ids()) < 2 else MIN_SHM_BYTES_OF_RANKS
    wanted = f", at least {least >> 20} are needed" if num_bytes < least else ""
    say("/dev/shm", not wanted, f"{num_bytes >> 20} MiB{wanted}")
