"""Stored forms of KV: their bytes against numpy, torch and native code alike, and whole engines on quantized KV."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from baton.engine import native
from baton.engine.core.config import KV_DTYPES, EngineConfig
from baton.engine.engine import Engine
from baton.engine.kv.pool import KVPool
from baton.engine.kv.stored_forms import STORED, decode, encode
from baton.engine.models.loader import load_model
from kvtransfer.layout import KV_FORMS, KVGroup, KVLayout
from tests.support.engine.collector import run_to_end
from tests.support.engine.manual_batch import ManualBatch
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_folder, random_ids

QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
KERNELS = {"native": ("auto", "auto"), "torch": ("sdpa", "dense")}  # attention, linear


def rows_of(seed: int, head_dim: int = 64) -> torch.Tensor:
    """Rows of every size, among them zeros, equal values, one outlier, and what is too large for the form."""
    rows = torch.randn(200, head_dim, generator=torch.Generator().manual_seed(seed))
    rows *= torch.logspace(-9, 6, 200).unsqueeze(1)
    rows[0], rows[1], rows[2], rows[3, 5] = 0, 3.3, -1e-30, 1e4
    rows[4], rows[5, ::2] = 1e30, -7e8
    return rows


def by_hand(form: str, x: np.ndarray) -> np.ndarray:
    """Return x [rows, head_dim] as a form stores it, written a second time in numpy."""
    if form in ("int8", "int4"):
        low, levels = (x.min(1, keepdims=True), 15) if form == "int4" else (np.zeros((len(x), 1), np.float32), 127)
        reach = x.max(1, keepdims=True) - low if form == "int4" else np.abs(x).max(1, keepdims=True)
        scale = np.clip(reach / np.float32(levels), 0, 65504).astype(np.float16).astype(np.float32)
        zero = np.clip(low, -65504, 65504).astype(np.float16).astype(np.float32)
        q = np.divide(x - zero, scale, out=np.zeros_like(x), where=scale != 0)
        q = np.clip(np.rint(q), 0 if form == "int4" else -127, levels)
        return scale * q + zero
    mantissa, bias, largest = {"fp8_e4m3": (3, 7, 448.0), "fp8_e5m2": (2, 15, 57344.0)}[form]
    x = np.clip(x.astype(np.float64), -largest, largest)
    exponent = np.maximum(np.floor(np.log2(np.abs(x), out=np.full_like(x, -99), where=x != 0)), 1 - bias)
    unit = 2.0 ** (exponent - mantissa)
    return (np.rint(x / unit) * unit).astype(np.float32)


@pytest.mark.parametrize("form", QUANTIZED)
def test_round_trip_is_what_numpy_says(form):
    x = rows_of(0)
    rows, scales = encode(form, x)
    assert rows.shape == (200, 64 * KV_FORMS[form].bits // 8) and rows.dtype == torch.uint8
    assert scales.shape == (200, KV_FORMS[form].scale_bytes) and scales.dtype == torch.uint8
    np.testing.assert_array_equal(decode(form, rows, scales, torch.float32).numpy(), by_hand(form, x.numpy()))


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
def test_plain_forms_are_casts(form):
    x = rows_of(1)[6:150]
    rows, scales = encode(form, x)
    assert scales.numel() == 0
    assert torch.equal(decode(form, rows, scales, torch.float32), x.to(STORED[form]).float())


def test_order_of_bytes():
    rows, scales = encode("int4", torch.tensor([[0.0, 15.0, 1.0, 2.0]]))
    assert rows.tolist() == [[0xF0, 0x21]] and scales.view(torch.float16).tolist() == [[1.0, 0.0]]
    rows, scales = encode("int8", torch.tensor([[127.0, -127.0, 0.5, 1.5]]))
    assert rows.view(torch.int8).tolist() == [[127, -127, 0, 2]] and scales.view(torch.float16).tolist() == [[1.0]]


def test_bad_forms():
    with pytest.raises(ValueError, match="'int3': one of fp32"):
        encode("int3", torch.zeros(1, 4))
    with pytest.raises(ValueError, match="head_dim 3 is odd"):
        encode("int4", torch.zeros(1, 3))
    with pytest.raises(ValueError, match="kv_dtype 'int3': one of auto, fp32"):
        EngineConfig(model="m", kv_dtype="int3")
    assert set(KV_DTYPES) == {"auto", "fp8", *KV_FORMS}


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_pool_keeps_each_row_at_its_place(form, block_size):
    """Random writes in any order, blocks copied: what is read is what was written last; nothing else has changed."""
    generator = torch.Generator().manual_seed(block_size)
    layout = KVLayout((KVGroup("paged", 2, 3, 32, form, block_size),))
    pool = KVPool(layout, 4, memoryview(bytearray(4 * layout.block_bytes + 7)))
    truth = torch.zeros(4 * block_size, 2, 2, 3, 32)  # slot, layer, k | v, head
    for turn in range(6):
        slots = torch.randperm(4 * block_size, generator=generator)[: 1 + 3 * turn]
        for layer in range(2):
            kv = torch.randn(2, len(slots), 3, 32, generator=generator)
            pool.write(layer, slots, *kv)
            truth[slots, layer] = decode(form, *encode(form, kv), torch.float32).transpose(0, 1)
    pool.copy_block(3, 0)
    truth[:block_size] = truth[3 * block_size :]
    for layer in range(2):
        k, v = pool.gather(layer, torch.tensor([0, 2, 1]), 3 * block_size)
        expected = truth.view(4, block_size, 2, 2, 3, 32)[[0, 2, 1], :, layer].flatten(0, 1)
        assert torch.equal(k.float(), expected[:, 0].transpose(0, 1))
        assert torch.equal(v.float(), expected[:, 1].transpose(0, 1))


@pytest.mark.parametrize("form", STORED)
def test_pool_of_latent_rows(form):
    """A row is key and value at once, and takes half of what K and V take."""
    layout = KVLayout((KVGroup("latent", 3, 1, 40, form, 16),))
    pool = KVPool(layout, 3)
    assert 2 * layout.block_bytes == KVLayout((KVGroup("paged", 3, 1, 40, form, 16),)).block_bytes
    rows, slots = torch.randn(3, 20, 1, 40, generator=torch.Generator().manual_seed(2)), torch.arange(16, 36)
    for layer in range(3):
        pool.write(layer, slots, rows[layer])
    for layer in range(3):
        k, v = pool.gather(layer, torch.tensor([1, 2]), 20)
        assert torch.equal(k, v)
        assert torch.equal(k[0].float(), decode(form, *encode(form, rows[layer, :, 0]), torch.float32))


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def folder(request, tmp_path_factory):
    """q and k norms; a sliding window. Rows of whole vectors, so that all native kernels apply."""
    path = tmp_path_factory.mktemp(request.param)
    make_folder(path, request.param, head_dim=16)
    return path


def needs(kernels: str) -> None:
    if kernels == "native" and native.library() is None:
        pytest.skip(native.unavailable())


@pytest.mark.parametrize("form", STORED)
def test_native_layers_write_what_torch_writes(folder, form):
    """The fused layers against their twin in torch: logits near, and stored rows the same but for a rounding's hair."""
    needs("native")
    fused, plain = (
        load_model(EngineConfig(folder)),
        load_model(EngineConfig(folder, attention="reference", linear="dense")),
    )
    if fused.fused is None:
        pytest.skip(fused.reasons["layers"]["fused"])
    assert "fused" in fused.numerics and "torch" in plain.numerics
    hands = ManualBatch(fused, form), ManualBatch(plain, form)
    ids = random_ids(100, 3)
    for piece in (ids[:70], ids[70:99], ids[99:]):
        ours, theirs = (hand.step({"a": piece})["a"].log_softmax(1) for hand in hands)
        assert (ours - theirs).abs().mean() < (0.5 if form == "int4" else 0.1)
    blocks = torch.tensor(hands[0].block_ids["a"])
    for ours, theirs in zip(hands[0].pool.gather(0, blocks, 100), hands[1].pool.gather(0, blocks, 100), strict=True):
        assert ((ours != theirs).float().mean() if form != "fp32" else 0) < 0.02
        torch.testing.assert_close(ours.float(), theirs.float(), atol=1, rtol=0.1)


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decoded_kv_equals_recomputed_kv(folder, kernels, form, dtype):
    """Whole, in chunks, token by token, beside others: the same logits, and the same bytes in the pool."""
    needs(kernels)
    attention, linear = KERNELS[kernels]
    model = load_model(EngineConfig(folder, dtype=dtype, attention=attention, linear=linear))
    ids = random_ids(90, 5)

    def stored(hand: ManualBatch) -> list[torch.Tensor]:
        return [x for layer in range(2) for x in hand.pool.gather(layer, torch.tensor(hand.block_ids["a"]), 90)]

    whole = ManualBatch(model, form)
    truth, kv = whole.step({"a": ids})["a"], stored(whole)
    for cuts in ([1, 64, 65], [7, 30], [64, *range(80, 90)]):
        hand = ManualBatch(model, form)
        pieces = []
        for turn, (begin, end) in enumerate(zip([0, *cuts], [*cuts, 90], strict=True)):
            others = {f"b{turn // 2}": random_ids(1 + turn % 2 * 40, turn), "c": [5]}
            pieces.append(hand.step(others | {"a": ids[begin:end]})["a"])
        assert torch.equal(torch.cat(pieces), truth), cuts
        assert all(map(torch.equal, stored(hand), kv)), cuts


@pytest.mark.parametrize(
    ("kernels", "form"),
    [
        *(("native", form) for form in ("int8", "int4", "fp8")),
        ("torch", "int4"),
        *(pytest.param("torch", form, marks=pytest.mark.long) for form in ("int8", "fp8")),  # 3 s each
    ],
)
def test_an_engine_answers_alike_with_a_small_pool_and_shared_prefixes(folder, kernels, form):
    """A small pool, so that sequences are preempted and come back: the answers of each prompt alone, prefixes
    shared."""
    needs(kernels)
    attention, linear = KERNELS[kernels]
    options = dict(dtype="fp32", kv_dtype=form, attention=attention, linear=linear, block_size=16, max_num_seqs=4)

    def engine(**changes) -> Engine:
        return Engine.load(EngineConfig(model=folder, max_model_len=256, **(options | changes)))

    shared = random_ids(64, 9)

    def requests(name: str) -> list:
        return [engine_request(f"{name}{index}", shared + random_ids(5 * index + 1, index), 110) for index in range(3)]

    truth = [run_to_end(engine(num_blocks=64, max_num_batched_tokens=512), [request]) for request in requests("alone")]
    small = engine(num_blocks=29, max_num_batched_tokens=72)
    first = run_to_end(small, requests("first"))
    # Where all layers see 24 tokens, sequences that decode hold seven blocks at most: none is preempted.
    assert any(record.ended.report.num_preemptions for record in first.values()) == ("mistral" not in folder.name)
    again = [run_to_end(small, [request]) for request in requests("again")]
    assert all(record.first.num_cached_tokens for records in again for record in records.values())
    answers = [record.answer() for records in truth for record in records.values()]
    assert [record.answer() for record in first.values()] == answers
    assert [record.answer() for records in again for record in records.values()] == answers
    assert small.numerics_class.kv_form == {"fp8": "fp8_e4m3"}.get(form, form)


def test_without_the_library(folder):
    """BATON_NATIVE=off: everything still runs, and says why it is not native."""
    program = f"""
from pathlib import Path
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
engine = Engine.load(EngineConfig(Path({str(folder)!r}), kv_dtype="int4", num_blocks=8, threads=1))
model = engine.runner.model
assert model.fused is None and model.attention.name == "sdpa", model.attention.name
assert model.reasons["attention"]["native"] == "BATON_NATIVE=off", model.reasons
(record,) = run_to_end(engine, [engine_request("a", [5, 6, 7], 4)]).values()
print(len(record.answer()[0][0]))
"""
    environment = os.environ | {"BATON_NATIVE": "off"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "4", done.stderr
