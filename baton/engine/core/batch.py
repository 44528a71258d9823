"""Describe the inputs of one step: the tokens of its sequences, where their KV is written, and which rows need
logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

STATE_FIELDS = 4  # int32 fields of a sequence in a table of states


class StateRows(NamedTuple):
    """What a step does to the recurrent state of a sequence.

    The first `num_pending` tokens were proposals of the previous step, whose inputs are kept beside the state block.
    The last `num_drafts` tokens of the slice are proposals, which the state does not take in yet.
    """

    state_id: int
    num_pending: int = 0
    num_drafts: int = 0


FIRST_STATE = StateRows(0)  # for steps before serving


@dataclass(frozen=True, slots=True)
class SeqSlice:
    """One sequence's share of a step: a prefill chunk, or one decode token.

    Its queries are rows [query_start, query_start + query_len) of the batch and have positions
    [kv_len - query_len, kv_len). `kv_len` counts the tokens whose KV the pool holds once this step has written its own.
    """

    query_start: int
    query_len: int
    kv_len: int
    block_ids: Tensor  # int64 [>= ceil(kv_len / block_size)], in order of positions
    state: StateRows | None = None  # for models whose layers keep one

    @property
    def held_state(self) -> StateRows:
        """The state, for a model whose layers keep one."""
        assert self.state is not None
        return self.state


class AdapterRows(NamedTuple):
    """Rows [begin, end) of a batch that use an adapter."""

    begin: int
    end: int
    adapter: Any  # adapters.adapters.Adapter


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The sequences of a step, one after the other. `seqs` cover the rows in order without gaps."""

    token_ids: Tensor  # int64 [T]; on the host ~row stands for the token drawn from that row of the previous launch
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block_id * block_size + offset, where each token's KV is written
    seqs: list[SeqSlice]
    logit_rows: Tensor  # int64 [R]: the rows of the batch whose logits are needed
    table: "SeqTable | None" = None  # `seqs` as tensors, if the batch is on a GPU
    adapters: tuple[AdapterRows, ...] = ()  # in order of rows; neighbouring rows with the same adapter are one entry


def known_ids(token_ids: Tensor, previous_tokens: Tensor) -> Tensor:
    """Return `token_ids` [T] with each ~row replaced by that row of `previous_tokens` [R], all on one device."""
    return torch.where(token_ids < 0, previous_tokens[(~token_ids).clamp_(min=0)], token_ids)


@dataclass(frozen=True, slots=True)
class SeqTable:
    """The sequences of a step as kernels read them, on the batch's device. Padding has a kv_len of 0."""

    query_starts: Tensor  # int32 [S + 1]: sequence i owns the rows [query_starts[i], query_starts[i + 1])
    kv_lens: Tensor  # int32 [S]
    block_ids: Tensor  # int32 [S, N]; columns after a sequence's own are not read
    max_query_len: int  # bounds for launches: in a CUDA graph, of any step that it may be replayed for
    max_kv_len: int
    # int32 [S, STATE_FIELDS], see kernels/state/inputs.py; for models whose layers keep a state
    states: Tensor | None = None

    @classmethod
    def of(cls, seqs: Sequence[SeqSlice], device: torch.device | str = "cpu") -> "SeqTable":
        """Build the table on the host and copy it to `device`."""
        starts = [*(seq.query_start for seq in seqs), seqs[-1].query_start + seqs[-1].query_len]
        widths = [len(seq.block_ids) for seq in seqs]
        block_ids = torch.zeros(len(seqs), max(widths), dtype=torch.int32)
        for row, seq, width in zip(block_ids, seqs, widths, strict=True):
            row[:width] = seq.block_ids
        states = None if seqs[0].state is None else state_fields(seqs).to(device)
        return cls(
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor([seq.kv_len for seq in seqs], dtype=torch.int32, device=device),
            block_ids.to(device),
            max(seq.query_len for seq in seqs),
            max(seq.kv_len for seq in seqs),
            states,
        )


def state_fields(seqs: Sequence[SeqSlice], repeated: int = 0, num_repeats: int = 0) -> Tensor:
    """Return the states of a step's sequences for kernels, int32 [S + num_repeats, STATE_FIELDS], on the host.

    The last `num_repeats` rows are padding that repeats sequence `repeated`.
    """
    rows = [[*seq.held_state, num_repeats if index == repeated else 0] for index, seq in enumerate(seqs)]
    return torch.tensor(rows + [[-1, 0, 0, 0]] * num_repeats, dtype=torch.int32, device="cpu")
