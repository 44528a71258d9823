"""What one step computes: the tokens of all its sequences, where their KV goes, and which rows want logits."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SeqSlice:
    """One sequence's share of a step: a prefill chunk, or one decode token.

    Its queries are rows [query_start, query_start + query_len) of the batch and stand at positions
    [kv_len - query_len, kv_len). `kv_len` counts the tokens whose KV the pool holds once this step has written its own.
    """

    query_start: int
    query_len: int
    kv_len: int
    block_ids: Tensor  # int64 [>= ceil(kv_len / block_size)], in order of positions


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All sequences of a step, one after the other; `seqs` cover the rows in order without gaps."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block_id * block_size + offset, where each token's KV is written
    seqs: list[SeqSlice]
    logit_rows: Tensor  # int64 [R]: the rows of the batch whose logits are wanted
