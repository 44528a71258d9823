"""Step 3: check the compiled kernels at the shapes of an 8B model: against float64, that a row has the same bits in any
batch, and their rates against cuBLAS."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from baton.cli.gpu.check import Say
from baton.cli.gpu.random_engine import FORMS, RandomSource
from baton.engine.attention.base import Attention, AttentionShape
from baton.engine.attention.selection import BACKENDS
from baton.engine.core.batch import ForwardBatch, SeqSlice, SeqTable
from baton.engine.kv.pool import KVPool
from baton.engine.layers.linear.gpu import GpuChoice
from kvtransfer.layout import KVGroup, KVLayout

SIZES = (14336, 4096)  # outputs and inputs of a matrix product
ROWS = (1, 17, 64, 300)
MANY_ROWS = 8192
HEADS = (32, 8, 128)  # query heads, KV heads, head_dim
LENGTHS = ((1, 700), (1, 33), (90, 500))  # of the sequences of a step: queries, positions
# Relative errors of y with bf16 in and out; int8 and e4m3 also round the activations.
TOLERANCES = {"bf16": 0.006, "int4-g128": 0.006, "fp8": 0.06, "int8": 0.02}
ATTENTION_TOLERANCE = 2e-2


def check(say: Say, model: Path | None, device: torch.device | None = None, sizes=SIZES, heads=HEADS) -> None:
    device = device or torch.device("cuda", 0)
    with torch.inference_mode():
        for form in FORMS:
            for exact in (True, False):
                _product(say, form, exact, device, sizes)
        for name in ("triton", "triton-fast"):
            _attention(say, name, device, heads)


def _product(say: Say, form: str, exact: bool, device: torch.device, sizes: tuple[int, int]) -> None:
    weight = RandomSource(form, device).linear("mlp.up_proj", *sizes)
    what = f"{form} product, {'exact' if exact else 'fast'}"
    kernel = GpuChoice("auto", exact, torch.bfloat16, device)(weight)
    x = torch.randn(max(ROWS), sizes[1], device=device).bfloat16()
    wanted = x.double() @ weight.dequantize().double().t()
    errors = [float((kernel(x[:rows]).double() - wanted[:rows]).norm() / wanted[:rows].norm()) for rows in ROWS]
    is_right = max(errors) < TOLERANCES[form]
    text = f"largest error {max(errors):.1e} of {TOLERANCES[form]:g}"
    if exact:
        together = kernel(x)
        alike = all(torch.equal(kernel(x[row : row + 1])[0], together[row]) for row in (0, 13, max(ROWS) - 1))
        is_right &= alike
        text += "; rows alone have the bits of a batch" if alike else "; a ROW ALONE DIFFERS from the same in a batch"
    say(what, is_right, text + _rate(kernel, weight, device, sizes))


def _rate(kernel: Callable[[Tensor], Tensor], weight, device: torch.device, sizes: tuple[int, int]) -> str:
    if device.type != "cuda":
        return ""
    x = torch.randn(MANY_ROWS, sizes[1], device=device).bfloat16()
    dense = weight.dequantize().bfloat16()
    flops = 2 * MANY_ROWS * sizes[0] * sizes[1]
    ours, theirs = (flops / _best_s(run) / 1e12 for run in (lambda: kernel(x), lambda: x @ dense.t()))
    return f"; {ours:.0f} TFLOP/s at {MANY_ROWS} rows, cuBLAS in bf16 {theirs:.0f}"


def _best_s(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def _attention(say: Say, name: str, device: torch.device, heads: tuple[int, int, int]) -> None:
    """Check one attention backend. KV that belongs to no sequence is NaN, so reading it shows."""
    shape = AttentionShape(*heads, (None,), torch.bfloat16, device, "bf16", 32)
    if why := BACKENDS[name].unfit(shape):
        say(f"attention {name}", False, why)
        return
    backend, exact = _made(name, shape), _made("reference", shape)
    pool = KVPool(KVLayout((KVGroup("paged", 1, heads[1], heads[2], "bf16", 32),)), 64, device=device)
    pool.blocks.fill_(float("nan"))
    batch, q = _step(pool, heads, device)
    found, wanted = torch.full_like(q, float("nan")), torch.empty_like(q)
    backend(backend.plan(batch, pool), 0, q, found)
    exact(exact.plan(batch, pool), 0, q, wanted)
    error = float((found.float() - wanted.float()).abs().max())
    is_right, text = error < ATTENTION_TOLERANCE, f"largest difference {error:.1e} of {ATTENTION_TOLERANCE:g}"
    if backend.batch_invariant:
        alone = ForwardBatch(
            batch.token_ids[:1], batch.positions[:1], batch.slots[:1], batch.seqs[:1], batch.logit_rows[:1]
        )
        single = torch.full_like(q[:1], float("nan"))
        backend(backend.plan(alone, pool), 0, q[:1], single)
        alike = torch.equal(single, found[:1])
        is_right &= alike
        text += "; a row alone, its KV split, has the bits of a batch" if alike else "; A ROW ALONE DIFFERS"
    say(f"attention {name}", is_right, text)


def _made(name: str, shape: AttentionShape) -> Attention:
    return BACKENDS[name](shape)


def _step(pool: KVPool, heads: tuple[int, int, int], device: torch.device) -> tuple[ForwardBatch, Tensor]:
    """Return a step with sequences of LENGTHS in their own blocks, KV written, and its queries."""
    seqs, slots, first_block, row = [], [], 0, 0
    for query_len, kv_len in LENGTHS:
        count = -(-kv_len // pool.block_size)
        block_ids = torch.arange(first_block, first_block + count, device=device)
        own = torch.arange(kv_len, device=device) + first_block * pool.block_size
        k, v = (torch.randn(kv_len, heads[1], heads[2], device=device).bfloat16() for _ in range(2))
        pool.write(0, own, k, v)
        seqs.append(SeqSlice(row, query_len, kv_len, block_ids))
        slots.append(own[-query_len:])
        first_block, row = first_block + count, row + query_len
    rows = torch.arange(row, device=device)
    q = torch.randn(row, heads[0], heads[2], device=device).bfloat16()
    return ForwardBatch(rows, rows, torch.cat(slots), seqs, rows, SeqTable.of(seqs, device)), q
