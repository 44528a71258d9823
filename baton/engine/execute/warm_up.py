"""Make the steps that run once before serving, so that no kernel is compiled while requests wait."""

import torch

from baton.engine.core.batch import FIRST_STATE, ForwardBatch, SeqSlice, StateRows

# The smallest number of rows for which linear kernels use each size of tiles, or sum leaves in one pass (257 rows with
# 4,096 outputs, 513 with 2,048, 1,025 with 1,024, and so on). The largest number is added in warm_steps.
CHUNKS = (1, 2, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097)
SPLIT_CONTEXT = 1024  # positions that every form of attention splits


def warm_steps(
    num_tokens: int, num_seqs: int, num_blocks: int, block_size: int, has_states: bool = False
) -> list[ForwardBatch]:  # fmt: skip
    """Return steps of every kind that runs without a graph, on the host.

    These are chunks of prompts from one to `num_tokens` tokens, decode of few and of `num_seqs` sequences with short
    and long contexts (KV is split over programs by both), and decode beside chunks. They write to blocks that no
    request has before serving.
    """
    room = num_blocks * block_size
    most = min(num_tokens, room)
    steps = [[(size, size)] for size in (*CHUNKS, most) if size <= most]
    for count in sorted({1, 2, num_seqs}):
        for kv_len in (1, min(room, SPLIT_CONTEXT)):
            decode = [(1, kv_len)] * count
            sizes = [size for size in (7, 33, most - count) if 0 < size <= most - count]
            steps += [decode, *([*decode, (size, size)] for size in sizes)]
    return [_step(lens, block_size, FIRST_STATE if has_states else None) for lens in steps]


def _step(lens: list[tuple[int, int]], block_size: int, state: StateRows | None) -> ForwardBatch:
    """Return a step of sequences, each with (query_len, kv_len) of `lens`, that share their blocks and `state`."""
    seqs, row = [], 0
    for query_len, kv_len in lens:
        seqs.append(SeqSlice(row, query_len, kv_len, torch.arange(-(-kv_len // block_size), device="cpu"), state))
        row += query_len
    positions = torch.cat([torch.arange(kv_len - query_len, kv_len, device="cpu") for query_len, kv_len in lens])
    ends = torch.tensor([seq.query_start + seq.query_len - 1 for seq in seqs], device="cpu")
    return ForwardBatch(torch.zeros_like(positions), positions, positions, seqs, ends)
