"""Watch Triton compile."""

import pytest

from baton.engine.kernels.compiling import CompileWatch

knobs = pytest.importorskip("triton").knobs


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
