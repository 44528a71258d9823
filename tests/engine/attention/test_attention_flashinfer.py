"""The FlashInfer adapter, on every machine through a stand-in; against the real one where it is."""

import sys
from dataclasses import replace

import pytest
import torch

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import BACKENDS, NOT_EXACT, choose
from tests.support.engine.attention import flashinfer_stand_in
from tests.support.engine.attention.attention_step import CAPPED, assert_close_to_exact, one_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIXED = [(1, 1), (1, 300), (20, 200), (1, 256), (3, 700)]
DECODE = [(1, 40), (1, 600), (1, 257)]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in.module())
    monkeypatch.setattr("baton.engine.attention.flashinfer.unfit_cuda", lambda device, least: "")
    flashinfer_stand_in.calls.clear()
    return flashinfer_stand_in.calls


def shape_of(dtype=torch.bfloat16, heads=(8, 2, 64), device=CPU, form="bf16", block_size=32):
    return AttentionShape(*heads, (None, 100, None), dtype, device, form, block_size)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
@pytest.mark.parametrize("lengths", [MIXED, DECODE, [(64, 300)]], ids=["mixed", "decode", "chunk"])
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 4, 128), (10, 2, 256)], ids=str)
def test_stand_in_against_fp64(form, lengths, heads, stand_in):
    shape = shape_of({"bf16": torch.bfloat16, "fp16": torch.float16}[form], heads, form=form)
    backend, _ = choose("flashinfer", shape, batch_invariant=False)
    assert_close_to_exact(backend, *one_step(shape, lengths, 32, form), atol=2e-2)


def test_a_given_scale_and_soft_cap(stand_in):
    backend = BACKENDS["flashinfer"](replace(shape_of(), **CAPPED))
    assert_close_to_exact(backend, *one_step(backend.shape, MIXED, 32, "bf16"), atol=2e-2)


def test_a_step_is_planned_once_for_each_window(stand_in):
    backend = BACKENDS["flashinfer"](shape_of())
    pool, batch, q = one_step(backend.shape, MIXED, 32, "bf16")
    plan, out = backend.plan(batch, pool), torch.empty_like(q)
    for layer in range(3):
        backend(plan, layer, q, out)
    assert stand_in == ["plan"] * 2 + ["run"] * 3


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": torch.float32}, "computes in bf16 or fp16"),
        ({"form": "int8"}, "reads KV in the compute dtype, int8 is stored"),
        ({"heads": (2, 1, 96)}, "head_dim 96 is not one of 64, 128, 256"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, reason, stand_in):
    with pytest.raises(ValueError, match=f"^attention backend 'flashinfer': {reason}; what fits: .*reference"):
        choose("flashinfer", shape_of(**change), batch_invariant=False)


def test_exact_mode_refuses_it_and_graphs_are_not_for_it(stand_in):
    with pytest.raises(ValueError, match=NOT_EXACT):
        choose("flashinfer", shape_of())
    assert not BACKENDS["flashinfer"].capturable


def test_without_a_gpu_or_the_module(monkeypatch):
    assert BACKENDS["flashinfer"].unfit(shape_of()) == "needs a CUDA device"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # an import of it fails
    reason = "flashinfer is not installed: pip install flashinfer-python"
    assert BACKENDS["flashinfer"].unfit(shape_of(device=CUDA)) == reason


def test_where_triton_is_not_it_is_chosen(stand_in, monkeypatch):
    """On a GPU with the kernels of Triton a decode step is a graph, so these come first."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("baton.engine.kernels.unavailable", lambda device: "triton is not installed")
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: torch.empty(*size, **options))
    backend, reasons = choose("auto", shape_of(device=CUDA), batch_invariant=False)
    assert backend.name == "flashinfer" and reasons["triton-fast"] == "triton is not installed"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [MIXED, DECODE, [(300, 700)]], ids=["mixed", "decode", "chunk"])
def test_the_real_one(lengths):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = shape_of(device=CUDA, heads=(8, 2, 128))
    if reason := BACKENDS["flashinfer"].unfit(shape):
        pytest.skip(reason)
    assert_close_to_exact(BACKENDS["flashinfer"](shape), *one_step(shape, lengths, 32, "bf16"), atol=2e-2)
