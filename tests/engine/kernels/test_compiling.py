"""Watch Triton compile, and what it compiles first: what launches kernels, which one line says where this machine
cannot."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime import driver as runtime

from baton.engine import kernels
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kernels.compiling import CompileWatch
from tests.support.model_folders.families import make_folder

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_triton_tells_when_it_compiles(monkeypatch):
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    watch = CompileWatch()
    watch.install()
    assert watch.since is None and watch.num_kernels == 0
    # As triton.runtime.jit calls both: what the first returns says whether to leave the compilation out.
    assert knobs.runtime.jit_cache_hook(key="k", repr="r", fn=None, compile={}) is False
    assert watch.since is not None
    knobs.runtime.jit_post_compile_hook(key="k", repr="r", fn=None, compile={})
    assert watch.since is None and watch.num_kernels == 1


@pytest.fixture
def gpu_host(monkeypatch, tmp_path):
    """A host on which torch finds a GPU, with a driver's library in `ldconfig -p` that nothing is linked to; Triton's
    cache is empty."""
    libcuda = tmp_path / "lib"
    libcuda.mkdir()
    (libcuda / "libcuda.so.1").write_bytes(b"")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr("baton.engine.loading.find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(nvidia.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(nvidia, "libcuda_dirs", lambda: [str(libcuda)])
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [str(libcuda)])
    monkeypatch.setattr(runtime, "_active", None)
    monkeypatch.setattr(runtime, "_default", None)
    monkeypatch.delattr(nvidia.CudaUtils, "instance", raising=False)
    build._find_compiler.cache_clear()
    yield
    build._find_compiler.cache_clear()


def refused(tmp_path) -> str:
    make_folder(tmp_path, "llama2")
    with pytest.raises(ValueError, match="Triton cannot build what launches its kernels") as error:
        Engine.load(EngineConfig(tmp_path))
    text = str(error.value)
    assert "\n" not in text
    return text


@without_gpu
def test_a_host_without_a_compiler(gpu_host, monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcc or clang" in refused(tmp_path) and "Failed to find C compiler" in refused(tmp_path)


@without_gpu
def test_a_host_without_headers_of_python(gpu_host, monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'driver.c: fatal error: Python.h: No such file or directory' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert "python3-dev" in refused(tmp_path)


@without_gpu
def test_a_host_whose_linker_does_not_know_the_drivers_library(gpu_host, monkeypatch, tmp_path):
    def nowhere():
        raise AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up")

    monkeypatch.setattr(nvidia, "library_dirs", nowhere)
    assert "libcuda.so cannot found! Please make sure" in refused(tmp_path)


@without_gpu
def test_the_interpreter_and_a_host_without_triton_build_nothing(gpu_host, monkeypatch):
    monkeypatch.setattr(nvidia, "library_dirs", lambda: pytest.fail("built"))
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    kernels.prepare()
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "unavailable", lambda device: "triton is not installed")
    kernels.prepare()
