"""Recognize processors, and the dtype that `auto` selects on each."""

import pytest

from baton.engine.core import cpu

ZEN3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx2 fma\n\nprocessor\t: 1\nmodel name\t: other\n"
ZEN4 = "processor\t: 0\nmodel name\t: AMD EPYC 9004\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\nCPU part\t: 0xd40\n"


@pytest.fixture
def processor(tmp_path, monkeypatch):
    def is_(cpuinfo: str | None) -> None:
        monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
        if cpuinfo is not None:
            (tmp_path / "cpuinfo").write_text(cpuinfo)
        cpu._fields.cache_clear()

    yield is_
    cpu._fields.cache_clear()


@pytest.mark.parametrize(
    "cpuinfo, name, flag, multiplies_bf16",
    [(ZEN3, "AMD EPYC", "fma", False), (ZEN4, "AMD EPYC 9004", "avx512f", True), (GRAVITON3, "0xd40", "i8mm", True)],
)
def test_what_the_system_tells(processor, cpuinfo, name, flag, multiplies_bf16):
    processor(cpuinfo)
    assert cpu.name() == name and flag in cpu.flags() and cpu.multiplies_bf16() == multiplies_bf16


def test_where_it_tells_nothing(processor):
    processor(None)
    assert cpu.name() and cpu.flags() == frozenset() and not cpu.multiplies_bf16()


def test_bf16_without_hardware_and_kernels_is_computed_in_fp32(processor):
    processor(ZEN3)
    assert cpu.compute_dtype("bf16", "no C++ compiler (g++) on this machine") == "fp32"
    assert cpu.compute_dtype("bf16", "") == "bf16", "native kernels widen it as they read"
    assert cpu.compute_dtype("fp32", "no C++ compiler") == "fp32"
    assert cpu.compute_dtype("fp16", "no C++ compiler") == "fp16"
    processor(ZEN4)
    assert cpu.compute_dtype("bf16", "no C++ compiler") == "bf16"


def test_what_is_lost_is_one_line_with_the_cure():
    said = cpu.lost("no C++ compiler (g++) on this machine", "bf16", "fp32")
    assert "install g++" in said and "twice their memory" in said and "\n" not in said
    said = cpu.lost("BATON_NATIVE=off", "bf16", "bf16")
    assert "BATON_NATIVE=off" in said and "install" not in said and "twice" not in said
