"""Batch-invariant by construction: the bits of a row are the same alone, in any batch, in any chunking.

Every linear and attention kernel at 1, 2, 7, 9, 64 and 512 rows and 1 and 2 threads, fp32 and bf16; then whole models.
"""

import pytest
import torch

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import BACKENDS, choose
from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.kv.pool import KVPool
from baton.engine.layers.activation import VECTOR_STRIDE, gated
from baton.engine.layers.linear import packed, quantized
from baton.engine.layers.linear.dense import DenseLinear
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.linear.quantized import QuantizedLinear
from baton.engine.layers.norm import RMSNorm
from baton.engine.models.loader import load_model
from baton.engine.weights.forms import DenseWeight
from kvtransfer.layout import KVGroup, KVLayout
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import make_folder, random_ids
from tests.support.model_folders.weight_forms import FORMS, dense_weight

ROWS = (1, 2, 7, 9, 64, 512)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_NATIVE = packed.unavailable()
EXACT_LINEAR = [DenseLinear] if NO_NATIVE else [DenseLinear, PackedLinear]  # of floating-point weights


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES)
def form(request):
    return request.param


def with_one_thread(compute):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)


def assert_rows_equal(apply, x: torch.Tensor, rows: tuple[int, ...] = ROWS):
    """apply(x) row by row equals apply on any number of rows, at either end of x."""
    truth = with_one_thread(lambda: apply(x))
    for count in rows:
        for begin in {0, len(x) - count}:
            got = apply(x[begin : begin + count].clone())
            assert torch.equal(got, truth[begin : begin + count]), f"{count} rows from {begin} differ"


# The demo model's shapes, a test model's, odd ones, and a large one.
SHAPES = [(48, 37), (64, 192), (100, 36), (256, 1536), (320, 4096), (864, 320), (2048, 2048)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", EXACT_LINEAR, ids=lambda kernel: kernel.name)
def test_rows_of_a_linear_have_the_same_bits_in_any_batch(kernel, shape, form, threads):
    torch.manual_seed(0)
    in_features, out_features = shape
    weight, bias, x = torch.randn(out_features, in_features), torch.randn(out_features), torch.randn(512, in_features)
    weight, bias, x = (tensor.to(DTYPES[form]) for tensor in (weight / in_features**0.5, bias, x))
    assert_rows_equal(kernel(DenseWeight(weight), bias, weight.dtype), x)


@pytest.mark.skipif(bool(NO_NATIVE), reason=NO_NATIVE)
@pytest.mark.parametrize("shape", [(96, 37), (480, 200)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_linear_of_every_form(name, shape, form, threads):
    """Any number of rows up to 64, then 512: tiles, unpacking and chunks begin at other numbers of rows."""
    torch.manual_seed(0)
    in_features, out_features = shape
    weight, x = FORMS[name]((out_features, in_features)), torch.randn(512, in_features).to(DTYPES[form])
    if packed.unfit(weight, x.dtype):
        pytest.skip(packed.unfit(weight, x.dtype))
    kernel = PackedLinear(weight, torch.randn(out_features).to(x.dtype), x.dtype)
    assert_rows_equal(kernel, x, rows=(*range(1, 65), 512) if threads == 1 else ROWS)


@pytest.mark.skipif(
    quantized.ENGINE not in torch.backends.quantized.supported_engines, reason="this torch was built without it"
)
def test_linear_of_torchs_integers(form, threads):
    torch.manual_seed(0)
    x = torch.randn(512, 1100).to(DTYPES[form])
    assert_rows_equal(QuantizedLinear(FORMS["int8-dynamic"]((200, 1100)), None, x.dtype), x)


@pytest.mark.skipif(bool(NO_NATIVE), reason=NO_NATIVE)
@pytest.mark.parametrize("shape", [(2500, 70), (4099, 130)], ids=str)
def test_long_sums_in_chunks(shape, form, threads):
    """Sums over more inputs than a chunk holds are put down and taken up again where there are many rows."""
    torch.manual_seed(0)
    in_features, out_features = shape
    weight, x = dense_weight((out_features, in_features), DTYPES[form]), torch.randn(512, in_features).to(DTYPES[form])
    assert_rows_equal(PackedLinear(weight, None, x.dtype), x, rows=(*range(1, 17), 64, 512))


@pytest.mark.parametrize("size", [48, 320, 2048])
def test_rows_of_a_norm_have_the_same_bits_in_any_batch(size, form, threads):
    torch.manual_seed(0)
    assert_rows_equal(RMSNorm(torch.rand(size).to(DTYPES[form]), 1e-6), torch.randn(512, size).to(DTYPES[form]))


@pytest.mark.parametrize("size", [VECTOR_STRIDE, 5 * VECTOR_STRIDE, 24 * VECTOR_STRIDE])
def test_rows_of_swiglu_have_the_same_bits_in_any_batch(size, form, threads):
    torch.manual_seed(0)
    assert_rows_equal(lambda x: gated(x, "silu"), torch.randn(512, 2 * size).to(DTYPES[form]) * 3)


HEADS = {"mha": (3, 3, 16), "gqa": (8, 2, 64), "gqa-odd": (6, 2, 80), "mqa": (5, 1, 32)}
# The reference takes every sequence by itself, so fewer shapes show as much in less time.
CASES = [(heads, window) for heads in HEADS for window in (None, 100)]
ATTENTION_CASES = [("native", *case) for case in CASES]
ATTENTION_CASES += [("sdpa", "gqa", None), ("sdpa", "mqa", 100), ("reference", "gqa-odd", None)]
ATTENTION_CASES += [
    pytest.param(*case, marks=pytest.mark.long)
    for case in [*(("sdpa", *case) for case in CASES), ("reference", "gqa", 100)]
    if case not in ATTENTION_CASES
]
QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")


def make_kv(shape: AttentionShape, form: str, num_tokens: int) -> tuple[KVPool, torch.Tensor]:
    """A pool that holds one long sequence in scattered blocks, and its block table."""
    group = KVGroup("paged", 1, shape.num_kv_heads, shape.head_dim, form, 32)
    pool = KVPool(KVLayout((group,)), num_tokens // 32)
    pool.write(0, torch.arange(num_tokens), *torch.randn(2, num_tokens, shape.num_kv_heads, shape.head_dim))
    return pool, torch.randperm(pool.num_blocks)


def attend(backend, pool: KVPool, seqs: list[SeqSlice], q: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.int64)
    out = torch.empty_like(q)
    backend(backend.plan(ForwardBatch(empty, empty, empty, seqs, empty), pool), 0, q, out)
    return out


@pytest.mark.parametrize(("name", "heads", "window"), ATTENTION_CASES)
def test_rows_of_attention_have_the_same_bits_in_any_batch(name, heads, window, form, threads):
    check_attention(name, heads, window, form, form)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *(("native", stored) for stored in QUANTIZED),
        ("sdpa", "int4"),
        *(pytest.param("sdpa", stored, marks=pytest.mark.long) for stored in QUANTIZED if stored != "int4"),
    ],
)
def test_attention_over_quantized_kv(name, stored, form, threads):
    check_attention(name, "gqa", 100, form, stored)


def check_attention(name: str, heads: str, window: int | None, form: str, stored: str) -> None:
    """One sequence of 1,088 tokens: its queries as a decode batch, as chunks, and as both at once."""
    torch.manual_seed(0)
    shape = AttentionShape(*HEADS[heads], windows=(window,), dtype=DTYPES[form])
    if reason := BACKENDS[name].unfit(shape):
        pytest.skip(reason)
    backend, _ = choose(name, shape)
    length = 1088
    pool, block_ids = make_kv(shape, stored, length)
    q = torch.randn(length, shape.num_heads, shape.head_dim).to(shape.dtype)
    truth = with_one_thread(lambda: attend(backend, pool, [SeqSlice(0, length, length, block_ids)], q))
    for count in ROWS:
        for begin in sorted({0, 250, length - count}):
            rows = slice(begin, begin + count)
            chunk = attend(backend, pool, [SeqSlice(0, count, begin + count, block_ids)], q[rows])
            assert torch.equal(chunk, truth[rows]), f"a chunk of {count} at {begin} differs"
        ends = torch.linspace(1, length, min(count, 9) if name == "reference" else count).long().tolist()
        rows = torch.tensor(ends) - 1
        decode = attend(backend, pool, [SeqSlice(i, 1, end, block_ids) for i, end in enumerate(ends)], q[rows])
        assert torch.equal(decode, truth[rows]), f"a decode batch of {count} differs"
    mixed = [SeqSlice(0, 1, 700, block_ids), SeqSlice(1, 9, 300, block_ids), SeqSlice(10, 1, 5, block_ids)]
    rows = torch.tensor([699, *range(291, 300), 4])
    assert torch.equal(attend(backend, pool, mixed, q[rows]), truth[rows])


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama3.1", "sdpa"),
        ("qwen3", "sdpa"),
        ("llama3.1", "reference"),
        *(pytest.param(name, "sdpa", marks=pytest.mark.long) for name in ("mistral", "qwen2")),
    ],
)
def test_logits_have_the_same_bits_however_a_sequence_is_computed(tmp_path, name, attention, form, threads):
    """Logits of one sequence: whole, in chunks, token by token, and beside others. KV decoded equals KV recomputed."""
    make_folder(tmp_path, name, dtype=DTYPES[form])
    model = load_model(EngineConfig(tmp_path, attention=attention))
    ids = random_ids(150, 1)
    hand = ManualBatch(model, form)
    truth = with_one_thread(lambda: hand.step({"a": ids})["a"])
    kv = hand.pool.gather(1, torch.tensor(hand.block_ids["a"]), 150)
    for cuts in ([1, 64, 65, 128], [7, 9, 100], [100, *range(135, 150)]):
        other = ManualBatch(model, form)
        pieces = []
        for turn, (begin, end) in enumerate(zip([0, *cuts], [*cuts, 150], strict=True)):
            # Company that comes, grows and goes; one of them decodes, the others bring chunks.
            company = {f"b{turn // 4}": random_ids(1 + turn % 2 * 70, turn), f"c{turn}": random_ids(5, turn)}
            pieces.append(other.step({"x": [5]} | {"a": ids[begin:end]} | company)["a"])
        assert torch.equal(torch.cat(pieces), truth), cuts
        again = other.pool.gather(1, torch.tensor(other.block_ids["a"]), 150)
        assert torch.equal(again[0], kv[0]) and torch.equal(again[1], kv[1])


def test_demo_sized_model(tmp_path, form, threads):
    """The shapes of the shipped model: 512 rows at once against chunks of 64 and a decode batch."""
    sizes = dict(hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=4, vocab_size=4096)
    make_folder(tmp_path, "llama3.2-tied", dtype=DTYPES[form], max_position_embeddings=2048, **sizes)
    model = load_model(EngineConfig(tmp_path))
    ids = random_ids(600, 2)
    truth = with_one_thread(lambda: ManualBatch(model, form, num_blocks=60).step({"a": ids})["a"])
    hand = ManualBatch(model, form, num_blocks=600)
    work = {f"s{index}": ids[: 40 * index + 9] for index in range(14)}
    hand.step(work)
    logits = hand.step({name: [ids[len(head)]] for name, head in work.items()})
    for name, head in work.items():
        assert torch.equal(logits[name][0], truth[len(head)]), name
    hand.step({"chunked": ids[:64]})
    assert torch.equal(hand.step({"chunked": ids[64:576]})["chunked"], truth[64:576])
