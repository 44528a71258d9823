"""A module with the signatures of flashinfer-python 0.6's paged prefill that computes in fp64 and refuses what the real
one refuses. Its device is `DEVICE` instead of CUDA."""

import types

import torch

from tests.support.engine.attention.attention_step import exact
from tests.support.engine.attention.flash_stand_in import DEVICE, check

calls: list[str] = []


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        check(float_workspace_buffer.device.type == DEVICE, "the workspace must be on CUDA")
        check(kv_layout in ("NHD", "HND"), f"Invalid kv_layout {kv_layout}")
        self._layout = kv_layout
        self._planned = None

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True,
    ):  # fmt: skip
        calls.append("plan")
        for name, x in (("qo_indptr", qo_indptr), ("paged_kv_indptr", paged_kv_indptr),
                        ("paged_kv_indices", paged_kv_indices), ("last_page_len", paged_kv_last_page_len)):  # fmt: skip
            check(x.dtype == torch.int32, f"{name} must be int32")
        check(len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1, "lengths differ")
        check(len(paged_kv_indices) == int(paged_kv_indptr[-1]), "paged_kv_indices is not as long as its indptr says")
        lens = paged_kv_last_page_len
        check(bool(((lens >= 1) & (lens <= page_size)).all()), "last_page_len is in [1, page_size]")
        check(num_qo_heads % num_kv_heads == 0, "num_qo_heads must be a multiple of num_kv_heads")
        check(head_dim_qk in (64, 128, 256), f"Unsupported head_dim {head_dim_qk}")
        check(causal, "the stand-in is causal")
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._planned = (qo_indptr, paged_kv_indptr, paged_kv_indices, lens, sizes, sm_scale, logits_soft_cap, window_left,
                         q_data_type, kv_data_type or q_data_type)  # fmt: skip

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, window_left=None, sinks=None):  # fmt: skip
        calls.append("run")
        check(self._planned is not None, "plan() comes before run()")
        starts, page_starts, pages, last, sizes, scale, softcap, window, q_dtype, kv_dtype = self._planned
        num_heads, num_kv_heads, head_dim, page_size = sizes
        k, v = paged_kv_cache
        check(self._layout == "HND" and k.shape[1:] == v.shape[1:] == (num_kv_heads, page_size, head_dim), "k, v")
        check(k.stride() == v.stride() and k.stride(-1) == 1, "k/v strides must be the same")
        check(q.shape == (int(starts[-1]), num_heads, head_dim) and q.stride(-1) == 1, "q")
        check(q.dtype == q_dtype and k.dtype == kv_dtype, "The dtype of q does not match the q_data_type of plan")
        check(q.dtype in (torch.float16, torch.bfloat16), "q must be fp16 or bf16")
        out = torch.empty_like(q) if out is None else out
        check(out.shape == q.shape and out.dtype == q.dtype, "out")
        out.fill_(float("nan"))
        for seq, (begin, end) in enumerate(zip(page_starts[:-1].tolist(), page_starts[1:].tolist(), strict=True)):
            kv_len = (end - begin - 1) * page_size + int(last[seq])
            rows = slice(int(starts[seq]), int(starts[seq + 1]))
            keys, values = (x[pages[begin:end].long()].transpose(0, 1).flatten(1, 2)[:, :kv_len] for x in (k, v))
            width = None if window < 0 else window + 1
            out[rows] = exact(q[rows], keys, values, kv_len, width, scale, softcap).to(q.dtype)
        return out


def module() -> types.ModuleType:
    made = types.ModuleType("flashinfer")
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return made
