"""The tier of AMX with its tiles emulated, for processors with AVX-512 VNNI and BF16: `pytest -p` of this module takes
it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.native import build, compiler, tier

LOWER, AMX = (next(found for found in tier.TIERS if found.name == name) for name in ("avx512-vnni-bf16", "avx512-amx"))
EMULATED = replace(AMX, needs=frozenset(), flags=(*LOWER.flags, "-DBATON_EMULATED_TILES"))
COMPILER = shutil.which("g++")


def pytest_configure() -> None:
    tier.TIERS = tuple(EMULATED if found is AMX else found for found in tier.TIERS)


def linear_kernels(folder: Path) -> build.NativeLibrary:
    """Compile them alone: attention and layers take three times as long."""
    assert COMPILER is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "SOURCES", compiler.SOURCES / "linear")
        patch.setattr(compiler, "FLAGS", tuple(flag.replace("-O3", "-O1") for flag in compiler.FLAGS))
        return build.NativeLibrary(compiler.compiled([COMPILER], EMULATED.flags, folder), EMULATED)
