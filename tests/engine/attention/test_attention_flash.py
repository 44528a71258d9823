"""The flash-attn adapters, on every machine through a stand-in; against the real ones where they are."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from baton.engine.attention import flash
from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import BACKENDS, NOT_EXACT, choose
from baton.engine.core.batch import SeqTable
from tests.support.engine.attention import flash_stand_in
from tests.support.engine.attention.attention_step import CAPPED, assert_close_to_exact, attended, batch_of, one_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLASH = ("flash", "flash3", "flash4")
MIXED = [(1, 1), (1, 300), (20, 200), (1, 256), (3, 700)]
DECODE = [(1, 40), (1, 600), (1, 257)]


@pytest.fixture
def stand_in(monkeypatch):
    for name, module in flash_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("baton.engine.attention.flash.unfit_cuda", lambda device, least, below=None: "")
    flash_stand_in.calls.clear()
    return flash_stand_in.calls


def shape_of(dtype=torch.bfloat16, heads=(8, 2, 64), device=CPU, form="bf16", block_size=256):
    return AttentionShape(*heads, (None, 100), dtype, device, form, block_size)


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("form", ["bf16", "fp16"])
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 4, 96), (8, 1, 256)], ids=str)
def test_stand_in_against_fp64(name, form, heads, stand_in):
    shape = shape_of({"bf16": torch.bfloat16, "fp16": torch.float16}[form], heads, form=form)
    backend, _ = choose(name, shape, batch_invariant=False)
    assert_close_to_exact(backend, *one_step(shape, MIXED, 256, form), atol=2e-2)


@pytest.mark.parametrize("name", FLASH)
def test_a_given_scale_and_soft_cap(name, stand_in):
    backend = BACKENDS[name](replace(shape_of(), **CAPPED))
    assert_close_to_exact(backend, *one_step(backend.shape, MIXED, 256, "bf16"), atol=2e-2)


@pytest.mark.parametrize(
    "lengths, calls",
    [
        (MIXED, ["kvcache", "varlen"]),
        (DECODE, ["kvcache"]),
        ([(4, 9), (4, 300)], ["kvcache"]),
        ([(64, 300)], ["varlen"]),
    ],
    ids=["mixed", "decode", "verification", "chunk"],
)
def test_which_function_is_called(lengths, calls, stand_in):
    """Decode and verification: with the cache; chunks: varlen."""
    backend = BACKENDS["flash"](shape_of())
    pool, batch, q = one_step(backend.shape, lengths, 256, "bf16")
    assert_close_to_exact(backend, pool, batch, q, atol=2e-2)
    assert stand_in == calls * len(backend.shape.windows)


@pytest.mark.parametrize("name", FLASH)
def test_a_step_known_by_its_bounds(name, stand_in):
    """As in a CUDA graph: nothing but the table."""
    backend = BACKENDS[name](shape_of())
    pool, batch, q = one_step(backend.shape, DECODE, 256, "bf16")
    bounds = batch_of([])
    object.__setattr__(bounds, "table", SeqTable.of(batch.seqs))
    assert torch.equal(attended(backend, pool, bounds, 0, q), attended(backend, pool, batch, 0, q))


@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_any_page_size_for_three_and_four(name, stand_in):
    backend, reasons = choose(name, shape_of(block_size=32), batch_invariant=False)
    assert reasons["flash"] == f"{name} was asked for"
    assert_close_to_exact(backend, *one_step(backend.shape, MIXED, 32, "bf16"), atol=2e-2)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"block_size": 128}, "block_size 128 is not a multiple of 256"),
        ({"dtype": torch.float32}, "computes in bf16 or fp16"),
        ({"form": "int8"}, "reads KV in the compute dtype, int8 is stored"),
        ({"heads": (2, 1, 320)}, "head_dim 320 is not a multiple of 8 up to 256"),
        ({"heads": (2, 1, 20)}, "head_dim 20 is not a multiple of 8 up to 256"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_passed_over_and_refused_by_name(change, reason, stand_in):
    shape = shape_of(**change)
    assert BACKENDS["flash"].unfit(shape) == reason
    with pytest.raises(ValueError, match=f"^attention backend 'flash': {reason}; what fits: .*reference"):
        choose("flash", shape, batch_invariant=False)


@pytest.mark.parametrize("change", [{"dtype": torch.float32, "form": "fp32"}, {"block_size": 64}], ids=str)
def test_the_stand_in_refuses_what_the_real_one_refuses(change, stand_in):
    """The reasons of `unfit` are needed: without them the call fails."""
    shape = shape_of(**change)
    backend = BACKENDS["flash"](shape)
    pool, batch, q = one_step(shape, DECODE, shape.block_size, shape.kv_form)
    with pytest.raises(RuntimeError, match="fp16 and bf16|divisible by 256"):
        attended(backend, pool, batch, 0, q)


def test_the_stand_in_refuses_strides_dtypes_and_devices(stand_in):
    q, k = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16), torch.zeros(3, 256, 2, 64, dtype=torch.bfloat16)
    ints = {"cache_seqlens": torch.ones(2, dtype=torch.int32), "block_table": torch.zeros(2, 1, dtype=torch.int32)}
    call = flash_stand_in.flash_attn_with_kvcache
    for change, words in (
        ({"q": q.transpose(2, 3)}, "contiguous last dimension"),
        ({"k_cache": k.to("meta")}, "must be on CUDA"),
        ({"block_table": ints["block_table"].long()}, "dtype int32"),
        ({"v_cache": k.half()}, "same dtype"),
    ):
        arguments = {"q": q, "k_cache": k, "v_cache": k, "softmax_scale": 0.125, "causal": True} | ints | change
        with pytest.raises(RuntimeError, match=words):
            call(**arguments)


def test_chosen_on_a_gpu(stand_in, monkeypatch):
    """Fast mode takes the fastest; exact mode passes over what splits by load, and says so."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: type("Properties", (), {"multi_processor_count": 132})
    )
    shape = shape_of(device=CUDA)
    backend, reasons = choose("auto", shape, batch_invariant=False)
    assert backend.name == "flash3" and reasons["native"] == "computes on the CPU"
    backend, reasons = choose("auto", shape)
    assert backend.name == "triton"
    assert reasons["flash"] == reasons["flash3"] == reasons["triton-fast"] == NOT_EXACT
    with pytest.raises(ValueError, match=f"'flash': {NOT_EXACT}; what fits: triton, flash4$"):
        choose("flash", shape)
    assert choose("flash4", shape)[0].batch_invariant


def test_without_a_gpu_or_a_module(monkeypatch):
    for name in FLASH:
        assert BACKENDS[name].unfit(shape_of()) == "needs a CUDA device"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert BACKENDS["flash"].unfit(shape_of(device=CUDA)) == "the device has compute capability 7.5, needs 8.0"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    reason = "the device has compute capability 10.0, needs 9.0 to below 10.0"
    assert BACKENDS["flash3"].unfit(shape_of(device=CUDA)) == BACKENDS["flash4"].unfit(shape_of(device=CUDA)) == reason
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # an import of it fails
    reason = "flash_attn is not installed: pip install --no-build-isolation flash-attn==2.8.3.post2"
    assert BACKENDS["flash"].unfit(shape_of(device=CUDA)) == reason
    # What flash-attn 4 leaves there where it is alone: a package without functions.
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert BACKENDS["flash"].unfit(shape_of(device=CUDA)) == reason
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    reason = "flash_attn.cute is not installed: pip install flash-attn-4"
    assert BACKENDS["flash4"].unfit(shape_of(device=CUDA)) == reason


def test_a_module_that_fails_as_it_is_imported(monkeypatch):
    """With whatever its code raises: `auto` takes another."""

    def load(name):
        raise RuntimeError("CUDA driver\nis too old")

    monkeypatch.setattr(flash, "load", load)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert BACKENDS["flash"].unfit(shape_of(device=CUDA)) == "flash_attn does not load: CUDA driver is too old"


def test_rows_of_a_part_are_sent_without_waiting(monkeypatch):
    waits, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to",
        lambda tensor, *given, non_blocking=False: waits.append(not non_blocking) or to(tensor, *given, non_blocking=non_blocking),
    )  # fmt: skip
    _, batch, _ = one_step(shape_of(), MIXED)
    table = SeqTable.of(batch.seqs)
    waits.clear()
    flash.part_of(batch.seqs, [0, 1], table)
    assert waits and not any(waits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("lengths", [MIXED, DECODE, [(300, 700)]], ids=["mixed", "decode", "chunk"])
def test_the_real_ones(name, lengths):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = shape_of(device=CUDA, heads=(8, 2, 128))
    if reason := BACKENDS[name].unfit(shape):
        pytest.skip(reason)
    assert_close_to_exact(BACKENDS[name](shape), *one_step(shape, lengths, 256, "bf16"), atol=2e-2)
