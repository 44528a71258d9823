"""Send a step's inputs to a GPU in one asynchronous copy from pinned memory.

    int64   token_ids [T]   positions [T]   slots [T]   logit_rows [R]
    int32   query_starts [S + 1]   kv_lens [S]   states [S, STATE_FIELDS] (of models whose layers keep a state)
    changed rows of the block table: int64 [C], their indices   int32 [C, columns], their block ids

The block table [S, N] stays on the device: for 256 sequences with contexts of 131,072 tokens it takes 4 MB, and a
decode step changes one row in 32.

For a CUDA graph a step is padded to the graph's shape. Padding sequences repeat the shortest sequence, so that they
write what is there already; they do not change states. Padding tokens after a chunk belong to no sequence and are not
written. Tokens that the previous step is still drawing are filled in on the device, after the copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.core.batch import STATE_FIELDS, ForwardBatch, SeqSlice, SeqTable, known_ids, state_fields

NUM_LONGS = 4  # the first parts are int64, the others int32
ALIGNMENT = 16  # bytes; Triton specializes kernels by it


@dataclass(frozen=True, slots=True)
class StepShape:
    """Numbers of tokens, logit rows, sequences and columns of the block table; whether sequences have states."""

    num_tokens: int
    num_rows: int
    num_seqs: int
    num_blocks: int
    has_states: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each part of StepViews, in order: NUM_LONGS parts of int64, then int32."""
        tokens, seqs = self.num_tokens, self.num_seqs
        return tokens, tokens, tokens, self.num_rows, seqs + 1, seqs, seqs * STATE_FIELDS * self.has_states

    @property
    def offsets(self) -> tuple[int, ...]:
        """The byte at which each part begins, and the end.

        Every part is aligned for any counts: otherwise kernels would be compiled again for unaligned arguments while
        requests wait.
        """
        places = [0]
        for index, size in enumerate(self.sizes):
            places.append(places[-1] + aligned(size * (8 if index < NUM_LONGS else 4)))
        return tuple(places)

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]


@dataclass(frozen=True, slots=True)
class StepViews:
    """The parts of one buffer, as views of it."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    states: Tensor  # [S * STATE_FIELDS], or empty

    @classmethod
    def of(cls, buffer: Tensor, shape: StepShape) -> "StepViews":
        """Return views of `buffer`, uint8 [at least shape.num_bytes]."""
        parts = []
        for index, (begin, size) in enumerate(zip(shape.offsets, shape.sizes, strict=False)):
            dtype = torch.int64 if index < NUM_LONGS else torch.int32
            parts.append(buffer[begin : begin + size * dtype.itemsize].view(dtype))
        return cls(*parts)


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return num_bytes + -num_bytes % ALIGNMENT


def changed_views(buffer: Tensor, begin: int, num_rows: int, columns: int) -> tuple[Tensor, Tensor, int]:
    """Return views of the changed rows' indices int64 [C] and block ids int32 [C, columns], and the byte of their
    end."""
    middle = begin + aligned(num_rows * 8)
    end = middle + num_rows * columns * 4
    rows = buffer[middle:end].view(torch.int32).view(num_rows, columns)
    return buffer[begin : begin + num_rows * 8].view(torch.int64), rows, end


class StepInputs:
    """The input buffers of one engine: one on the device, and two on the host, used in turn.

    The other host buffer may still be being copied for the step in flight. Belongs to the loop's thread.
    """

    def __init__(self, device: torch.device, largest: StepShape):
        self.device = device
        pinned = device.type == "cuda"
        largest = replace(largest, num_seqs=largest.num_seqs + 1)  # the warm-up has a chunk beside all sequences
        num_seqs, columns = largest.num_seqs, largest.num_blocks
        size = largest.num_bytes + aligned(8 * num_seqs) + 4 * num_seqs * columns
        self._hosts = [torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self._table = torch.zeros(num_seqs, columns, dtype=torch.int32, device=device)
        # The block ids that each row of the table was copied from; when a sequence's blocks change it has a new tensor.
        self._rows: list[Tensor | None] = [None] * num_seqs

    @property
    def num_bytes(self) -> int:
        """The bytes of its buffers on the device."""
        return self._target.nbytes + self._table.nbytes

    def static(self, shape: StepShape, max_query_len: int, max_kv_len: int) -> ForwardBatch:
        """Return a batch over the device's buffer, with the values last sent in this shape."""
        parts = StepViews.of(self._target, shape)
        block_ids = self._table[: shape.num_seqs, : shape.num_blocks]
        states = parts.states.view(-1, STATE_FIELDS) if shape.has_states else None
        table = SeqTable(parts.query_starts, parts.kv_lens, block_ids, max_query_len, max_kv_len, states)
        return ForwardBatch(parts.token_ids, parts.positions, parts.slots, [], parts.logit_rows, table)

    def send(self, batch: ForwardBatch, previous_tokens: Tensor | None = None) -> ForwardBatch:
        """Send `batch` from the host, unpadded, and return it on the device.

        `previous_tokens`: int64 [R] on the device, of the previous launch. The launch before that must have passed.
        """
        shape = shape_of(batch.seqs, len(batch.logit_rows))
        max_query_len, max_kv_len = (max(getattr(seq, name) for seq in batch.seqs) for name in ("query_len", "kv_len"))
        self.send_padded(batch, shape, previous_tokens)
        sent = self.static(shape, max_query_len, max_kv_len)
        starts = zip(batch.seqs, sent.table.block_ids, strict=True)
        seqs = [replace(seq, block_ids=block_ids) for seq, block_ids in starts]
        return replace(sent, seqs=seqs, adapters=batch.adapters)

    def send_padded(self, batch: ForwardBatch, shape: StepShape, previous_tokens: Tensor | None = None) -> None:
        """Send `batch` from the host, padded to `shape`.

        `batch`: sequences with the same number of tokens and logits of every row, or one chunk with at most one row of
        logits. `previous_tokens`: int64 [R], of the previous launch.
        """
        self._turn ^= 1
        host = self._hosts[self._turn]
        parts, seqs = StepViews.of(host, shape), batch.seqs
        num_tokens, num_rows, num_seqs = len(batch.token_ids), len(batch.logit_rows), len(seqs)
        for name in ("token_ids", "positions", "slots"):
            getattr(parts, name)[:num_tokens] = getattr(batch, name)
        parts.logit_rows[:num_rows] = batch.logit_rows
        starts = [seq.query_start for seq in seqs]
        parts.query_starts[: num_seqs + 1] = torch.tensor([*starts, num_tokens], device="cpu")
        parts.kv_lens[:num_seqs] = torch.tensor([seq.kv_len for seq in seqs], device="cpu")
        tables, shortest, missing = [seq.block_ids for seq in seqs], 0, shape.num_seqs - num_seqs
        if missing:
            shortest = min(range(num_seqs), key=lambda index: seqs[index].kv_len)
            tables += [seqs[shortest].block_ids] * missing
            self._pad(parts, seqs, shortest, num_tokens)
        elif num_tokens < shape.num_tokens or num_rows < shape.num_rows:
            pad_chunk(parts, num_tokens, num_rows)
        if shape.has_states:
            parts.states[:] = state_fields(seqs, shortest, missing).flatten()
        self._copy(host, shape.num_bytes, tables)
        if previous_tokens is not None:
            token_ids = StepViews.of(self._target, shape).token_ids
            token_ids.copy_(known_ids(token_ids, previous_tokens))

    def _copy(self, host: Tensor, num_bytes: int, tables: Sequence[Tensor]) -> None:
        """Copy `num_bytes` and the rows of the block table that differ from those on the device."""
        changed = [row for row, block_ids in enumerate(tables) if block_ids is not self._rows[row]]
        if not changed:
            self._target[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
            return
        columns = min(max(len(tables[row]) for row in changed), self._table.shape[1])
        index, rows, end = changed_views(host, num_bytes, len(changed), columns)
        index[:] = torch.tensor(changed, device="cpu")
        for place, row in zip(rows, changed, strict=True):
            block_ids = self._rows[row] = tables[row]
            place[: len(block_ids)] = block_ids[:columns]
            place[len(block_ids) :] = 0
        self._target[:end].copy_(host[:end], non_blocking=True)
        index, rows, _ = changed_views(self._target, num_bytes, len(changed), columns)
        self._table[:, :columns].index_copy_(0, index, rows)

    def _pad(self, parts: StepViews, seqs: Sequence[SeqSlice], shortest: int, num_tokens: int) -> None:
        first, width, num_seqs = seqs[shortest].query_start, seqs[shortest].query_len, len(seqs)
        for name in ("token_ids", "positions", "slots"):
            values = getattr(parts, name)
            values[num_tokens:].view(-1, width)[:] = values[first : first + width]
        parts.logit_rows[:] = torch.arange(len(parts.logit_rows), device="cpu")
        parts.query_starts[:] = torch.arange(0, len(parts.query_starts) * width, width, device="cpu")
        parts.kv_lens[num_seqs:] = parts.kv_lens[shortest]


def pad_chunk(parts: StepViews, num_tokens: int, num_rows: int) -> None:
    """Fill the rows after a chunk's tokens, so that no KV is written for them."""
    parts.token_ids[num_tokens:] = 0
    parts.positions[num_tokens:] = 0
    parts.slots[num_tokens:] = -1
    parts.logit_rows[num_rows:] = num_tokens - 1


def shape_of(seqs: Sequence[SeqSlice], num_rows: int) -> StepShape:
    """Return the shape of an unpadded step."""
    num_blocks = max(len(seq.block_ids) for seq in seqs)
    num_tokens, has_states = sum(seq.query_len for seq in seqs), seqs[0].state is not None
    return StepShape(num_tokens, num_rows, len(seqs), num_blocks, has_states)
