"""The kernel that normalizes, rotates, encodes and stores, against the torch modules that do it one after the other."""

import pytest
import torch

from baton.engine import kernels
from baton.engine.core.model_spec import RopeSpec
from baton.engine.kv.pool import KVPool
from baton.engine.kv.stored_forms import STORED
from baton.engine.layers.norm import RMSNorm
from baton.engine.layers.rope import Rope
from kvtransfer.layout import KVGroup, KVLayout
from tests.support.engine.attention.attention_step import on_device

H, HKV, LAYER, EPS = 3, 2, 1, 1e-6
SLOTS = [3, 33, 16]
POSITIONS = [0, 90, 7]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if reason := kernels.unavailable(request.param):
        pytest.skip(reason)
    return torch.device(request.param)


def empty_pool(form, head_dim):
    pool = KVPool(KVLayout((KVGroup("paged", 2, HKV, head_dim, form, 16),)), 4)
    pool.bytes.fill_(255)
    return pool


def write(device, heads, tables, norms, pool, slots=SLOTS):
    """(queries, the pool's bytes), both on the host."""
    from baton.engine.kernels.kv_write import write_kv

    there = on_device(pool, device)
    norms = norms and (norms[0].to(device), norms[1].to(device), norms[2])
    q = write_kv(
        heads.to(device), H, torch.tensor(POSITIONS, device=device), torch.tensor(slots, device=device),
        tuple(table.to(device) for table in tables), norms, there, LAYER,
    )  # fmt: skip
    return q.cpu(), there.bytes.cpu()


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("compute, head_dim", [(torch.float32, 24), (torch.bfloat16, 64)], ids=str)
def test_the_bytes_are_those_of_encode(form, compute, head_dim, device):
    """Neither norm nor rotation: zeros, equal values, values beyond fp16 and fp8 among them."""
    torch.manual_seed(head_dim)
    heads = (torch.randn(len(SLOTS), H + 2 * HKV, head_dim) * 3).to(compute)
    heads[0, 3], heads[1, 4] = 0, 0.25
    heads[2, 5] *= 3000
    tables = torch.ones(100, 1, head_dim), torch.zeros(100, 1, head_dim)
    q, got = write(device, heads, tables, None, empty_pool(form, head_dim))
    expected = empty_pool(form, head_dim)
    expected.write(LAYER, torch.tensor(SLOTS), heads[:, H : H + HKV], heads[:, H + HKV :])
    assert torch.equal(q, heads[:, :H])
    assert torch.equal(got, expected.bytes)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("compute, head_dim", [(torch.float32, 96), (torch.bfloat16, 64)], ids=str)
def test_norm_and_rotation(normed, compute, head_dim, device):
    torch.manual_seed(1)
    heads = torch.randn(len(SLOTS), H + 2 * HKV, head_dim).to(compute)
    rope = Rope(
        RopeSpec(kind="default", theta=10000.0, max_position_embeddings=100, original_context=100), head_dim, 100
    )
    norms = (torch.rand(head_dim).to(compute) + 0.5, torch.rand(head_dim).to(compute) + 0.5, EPS) if normed else None
    q, got = write(device, heads, rope.signed_tables, norms, empty_pool("fp32", head_dim))
    x = heads.double()
    cos, sin = (table[torch.tensor(POSITIONS)].double() for table in rope.signed_tables)
    parts = [x[:, :H], x[:, H : H + HKV]]
    if normed:
        parts = [RMSNorm(weight.double(), EPS)(part) for weight, part in zip(norms[:2], parts, strict=True)]
    true_q, true_k = (rope(part, cos, sin) for part in parts)
    pool = empty_pool("fp32", head_dim)
    pool.bytes.copy_(got)
    rows = pool.blocks[torch.tensor(SLOTS) // 16, LAYER, :, :, torch.tensor(SLOTS) % 16]
    torch.testing.assert_close(q.double(), true_q, atol=2e-2 if compute == torch.bfloat16 else 2e-6, rtol=0)
    torch.testing.assert_close(rows[:, 0].double(), true_k, atol=2e-6, rtol=0)
    assert torch.equal(rows[:, 1], heads[:, H + HKV :].float())


def test_a_slot_below_zero_is_not_written(device):
    heads = torch.randn(len(SLOTS), H + 2 * HKV, 64)
    tables = torch.ones(100, 1, 64), torch.zeros(100, 1, 64)
    q, got = write(device, heads, tables, None, empty_pool("int8", 64), slots=[-1] * len(SLOTS))
    assert torch.equal(got, empty_pool("int8", 64).bytes) and torch.equal(q, heads[:, :H])
