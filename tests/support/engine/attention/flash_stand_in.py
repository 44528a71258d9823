"""Modules with the signatures of flash-attn 2.8, of FlashAttention-3 and of flash-attn 4.0.0b36 that compute in fp64
and refuse what the real ones refuse (csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp,
flash_attn/cute/interface.py). Their device is `DEVICE` instead of CUDA."""

import types

import torch

from tests.support.engine.attention.attention_step import exact

DEVICE = "cpu"
calls: list[str] = []


def check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def check_operands(q, k, v, page_multiple: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check(x.device.type == DEVICE, f"{name} must be on CUDA")
        check(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype and v.dtype == q.dtype, "query and key must have the same dtype")
    check(k.shape[1] % page_multiple == 0, "Paged KV cache block size must be divisible by 256")
    head_size = q.shape[-1]
    check(head_size <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(head_size % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(k.shape == v.shape and k.shape[-1] == head_size, "k and v must have shape (blocks, page, heads_k, head_size)")


def check_ints(shape: tuple[int, ...], **tensors) -> None:
    for name, x in tensors.items():
        check(x.device.type == DEVICE, f"{name} must be on CUDA")
        check(x.dtype == torch.int32, f"{name} must have dtype int32")
        check(x.stride(-1) == 1 and x.shape[: len(shape)] == shape, f"{name} must have shape {shape}")


def paged(q, k, v, starts, kv_lens, table, scale, causal, window, softcap):
    """q [T, H, D], sequence after sequence."""
    check(causal and window[1] in (-1, 0), "the stand-in is causal")
    out = torch.full_like(q, float("nan"))
    for seq, kv_len in enumerate(kv_lens):
        rows = slice(starts[seq], starts[seq + 1])
        count = -(-kv_len // k.shape[1])
        keys, values = (x[table[seq, :count].long()].flatten(0, 1)[:kv_len].transpose(0, 1) for x in (k, v))
        width = window[0] + 1 if window[0] >= 0 else None
        out[rows] = exact(q[rows], keys, values, kv_len, width, scale, softcap).to(q.dtype)
    return out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    calls.append("varlen")
    check_operands(q, k, v, 256)
    num_seqs = cu_seqlens_q.numel() - 1
    check_ints((num_seqs + 1,), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_ints((num_seqs,), block_table=block_table)
    check(isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int), "max_seqlen must be int")
    lens = cu_seqlens_k.diff().tolist()
    check(max(lens) <= max_seqlen_k and int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "a sequence above its bound")
    return paged(q, k, v, cu_seqlens_q.tolist(), lens, block_table, softmax_scale, causal, window_size, softcap)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    calls.append("kvcache")
    check(q.dim() == 4, "q must have shape (batch_size, seqlen_q, num_heads, head_size)")
    check_operands(q, k_cache, v_cache, 256)
    check_ints((len(q),), cache_seqlens=cache_seqlens, block_table=block_table)
    starts = [q.shape[1] * i for i in range(len(q) + 1)]
    lens = cache_seqlens.tolist()
    rows = q.flatten(0, 1)
    out = paged(rows, k_cache, v_cache, starts, lens, block_table, softmax_scale, causal, window_size, softcap)
    return out.view_as(q)


def flash_attn_3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    calls.append("kvcache3")
    check(q.dim() == 3, "q must have shape (total_q, num_heads, head_size)")
    check_operands(q, k_cache, v_cache, 1)
    check_ints((len(cache_seqlens),), cache_seqlens=cache_seqlens, page_table=page_table)
    check_ints((len(cache_seqlens) + 1,), cu_seqlens_q=cu_seqlens_q)
    check(isinstance(max_seqlen_q, int), "max_seqlen_q must be int")
    starts, lens = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    return paged(q, k_cache, v_cache, starts, lens, page_table, softmax_scale, causal, window_size, softcap)


def flash_attn_4_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    calls.append("varlen4")
    check(num_splits == 1, "the stand-in does not split")
    check(cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k")
    check_operands(q, k, v, 1)
    check_ints((len(seqused_k),), seqused_k=seqused_k, page_table=page_table)
    check_ints((len(seqused_k) + 1,), cu_seqlens_q=cu_seqlens_q)
    check(isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int), "bounds on the host")
    starts, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
    window = tuple(-1 if side is None else side for side in window_size)
    return paged(q, k, v, starts, lens, page_table, softmax_scale, causal, window, softcap), None


def modules() -> dict[str, types.ModuleType]:
    """By the names that they are imported under."""
    two, three = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    two.flash_attn_varlen_func, two.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    three.flash_attn_with_kvcache = flash_attn_3_with_kvcache
    four = types.ModuleType("flash_attn.cute")
    four.flash_attn_varlen_func = flash_attn_4_varlen_func
    return {"flash_attn": two, "flash_attn_interface": three, "flash_attn.cute": four}
