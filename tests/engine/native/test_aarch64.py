"""The kernels for 64 bit Arm give the bits of x86-64-v3: every call of a recording is repeated by an emulator."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.native.compiler import compiled
from baton.engine.native.tier import available, tiers_for
from tests.support.pace import patience
from tests.support.process import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
KERNELS = (
    "baton_attention",
    "baton_decode",
    "baton_delta_net",
    "baton_draft",
    "baton_draw",
    "baton_heads",
    "baton_layers",
    "baton_linear",
    "baton_mamba2",
    "baton_mamba_convolve",
    "baton_mamba_scan",
    "baton_norm",
    "kv_copy_runs",
    "kv_word_sums",
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER} or {EMULATOR}"),
    pytest.mark.skipif("x86-64-v3" not in (tier.name for tier in available()), reason="no x86-64-v3 to record"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a recording, and the program that repeats it by a library."""
    folder = tmp_path_factory.mktemp("aarch64")
    source = ROOT / "tests/support/native/replay_calls.cpp"
    subprocess.run(
        [COMPILER, "-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", source, "-o", folder / "replay"], check=True
    )
    argv = [sys.executable, "-m", "tests.support.native.native_calls", folder / "calls"]
    subprocess.run(argv, cwd=ROOT, env=os.environ | {"BATON_ISA": "x86-64-v3"}, check=True)
    return folder


@pytest.fixture(scope="module", params=tiers_for("aarch64"), ids=lambda tier: tier.name)
def library(request, tmp_path_factory) -> Path:
    """Of one tier for Arm."""
    folder = tmp_path_factory.mktemp(request.param.name)
    return compiled([COMPILER], request.param.flags, folder, ["-Wl,--no-as-needed", "-lgomp"])


def replayed(folder: Path, library: Path, calls: str) -> subprocess.CompletedProcess:
    argv = [EMULATOR, "-cpu", "max", "-L", SYSROOT, folder / "replay", library, folder / calls]
    return subprocess.run(argv, capture_output=True, text=True, timeout=patience(600))


def test_every_kernel_gives_the_same_bits(folder, library):
    done = replayed(folder, library, "calls")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert (
        sorted(counts) == sorted(KERNELS) and int(counts["baton_linear"]) > 80 and int(counts["baton_attention"]) > 40
    )


def test_one_other_bit_is_noticed(folder, library):
    calls = bytearray((folder / "calls").read_bytes())
    calls[-1] ^= 1  # of the last region's memory after the last call
    (folder / "other").write_bytes(calls)
    done = replayed(folder, library, "other")
    assert done.returncode == 1 and "differs" in done.stdout
