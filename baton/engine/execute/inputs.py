"""Send a step's inputs to a GPU: packed on the host in pinned memory, in one copy that no thread waits for.

    int64   token_ids [T]   positions [T]   slots [T]   logit_rows [R]
    int32   query_starts [S + 1]   kv_lens [S]   block_ids [S, N]

Where a step goes into a CUDA graph it is padded to the graph's shape: sequences of padding repeat the step's shortest,
so that whatever they write is what is there already; tokens behind the end of a chunk are no sequence's, and are not
written. Tokens that the step before has yet to draw are filled in on the
device, behind the copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqSlice, SeqTable, known_ids

NUM_LONGS = 4  # parts of int64; those of int32 follow
ALIGNMENT = 16  # bytes, that Triton's kernels are specialized by


@dataclass(frozen=True, slots=True)
class StepShape:
    """Tokens, logit rows, sequences, and columns of the block table."""

    num_tokens: int
    num_rows: int
    num_seqs: int
    num_blocks: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the elements of each of StepViews' parts, in order: NUM_LONGS of int64, the others of int32."""
        tokens, seqs = self.num_tokens, self.num_seqs
        return tokens, tokens, tokens, self.num_rows, seqs + 1, seqs, seqs * self.num_blocks

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the byte at which each part begins, and the end. Every part is aligned, whatever the counts are: a
        kernel that is compiled for aligned arguments would else be compiled once more while requests wait."""
        places = [0]
        for index, size in enumerate(self.sizes):
            num_bytes = size * (8 if index < NUM_LONGS else 4)
            places.append(places[-1] + num_bytes + -num_bytes % ALIGNMENT)
        return tuple(places)

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]


@dataclass(frozen=True, slots=True)
class StepViews:
    """Views of one buffer, as the module says."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    block_ids: Tensor

    @classmethod
    def of(cls, buffer: Tensor, shape: StepShape) -> "StepViews":
        """Return views of `buffer`, uint8 [at least shape.num_bytes]."""
        parts = []
        for index, (begin, size) in enumerate(zip(shape.offsets, shape.sizes, strict=False)):
            dtype = torch.int64 if index < NUM_LONGS else torch.int32
            parts.append(buffer[begin : begin + size * dtype.itemsize].view(dtype))
        *others, table = parts
        return cls(*others, table.view(shape.num_seqs, -1))


class StepInputs:
    """The buffers of one engine: one on the device, which steps read in turn, and two on the host, since that of the
    step in flight may not have been copied yet. Belongs to the loop's thread."""

    def __init__(self, device: torch.device, largest: StepShape):
        self.device = device
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(largest.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)
        ]
        self._turn = 0
        self._target = torch.zeros(largest.num_bytes, dtype=torch.uint8, device=device)

    def static(self, shape: StepShape, max_query_len: int, max_kv_len: int) -> ForwardBatch:
        """Return a batch of this shape over the device's buffer, with the values last sent with that shape."""
        parts = StepViews.of(self._target, shape)
        table = SeqTable(parts.query_starts, parts.kv_lens, parts.block_ids, max_query_len, max_kv_len)
        return ForwardBatch(parts.token_ids, parts.positions, parts.slots, [], parts.logit_rows, table)

    def send(self, batch: ForwardBatch, before: Tensor | None = None) -> ForwardBatch:
        """Send `batch`, made on the host, unpadded. `before` int64 [R]: tokens of the launch before, on the device. The
        step before that one must have passed."""
        shape = shape_of(batch.seqs, len(batch.logit_rows))
        max_query_len, max_kv_len = (max(getattr(seq, name) for seq in batch.seqs) for name in ("query_len", "kv_len"))
        self._fill(batch, shape, before)
        sent = self.static(shape, max_query_len, max_kv_len)
        starts = zip(batch.seqs, sent.table.block_ids, strict=True)
        seqs = [SeqSlice(seq.query_start, seq.query_len, seq.kv_len, block_ids) for seq, block_ids in starts]
        return ForwardBatch(sent.token_ids, sent.positions, sent.slots, seqs, sent.logit_rows, sent.table)

    def send_padded(self, batch: ForwardBatch, shape: StepShape, before: Tensor | None = None) -> None:
        """Send `batch` padded to `shape`: sequences of one number of tokens that want the logits of every row, or a chunk
        of one that wants one row's at most. `before` int64 [R]: tokens of the launch before."""
        self._fill(batch, shape, before)

    def _fill(self, batch: ForwardBatch, shape: StepShape, before: Tensor | None) -> None:
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
        for row, seq in zip(parts.block_ids, seqs, strict=False):
            width = min(len(seq.block_ids), shape.num_blocks)
            row[:width] = seq.block_ids[:width]
            row[width:] = 0
        if num_seqs < shape.num_seqs:
            self._pad(parts, seqs, num_tokens)
        elif num_tokens < shape.num_tokens or num_rows < shape.num_rows:
            pad_chunk(parts, num_tokens, num_rows)
        self._target[: shape.num_bytes].copy_(host[: shape.num_bytes], non_blocking=True)
        if before is not None:
            token_ids = StepViews.of(self._target, shape).token_ids
            token_ids.copy_(known_ids(token_ids, before))

    def _pad(self, parts: StepViews, seqs: Sequence[SeqSlice], num_tokens: int) -> None:
        shortest = min(range(len(seqs)), key=lambda index: seqs[index].kv_len)
        first, width, num_seqs = seqs[shortest].query_start, seqs[shortest].query_len, len(seqs)
        for name in ("token_ids", "positions", "slots"):
            values = getattr(parts, name)
            values[num_tokens:].view(-1, width)[:] = values[first : first + width]
        parts.logit_rows[:] = torch.arange(len(parts.logit_rows), device="cpu")
        parts.query_starts[:] = torch.arange(0, len(parts.query_starts) * width, width, device="cpu")
        parts.kv_lens[num_seqs:] = parts.kv_lens[shortest]
        parts.block_ids[num_seqs:] = parts.block_ids[shortest]


def pad_chunk(parts: StepViews, num_tokens: int, num_rows: int) -> None:
    parts.token_ids[num_tokens:] = 0
    parts.positions[num_tokens:] = 0
    parts.slots[num_tokens:] = -1
    parts.logit_rows[num_rows:] = num_tokens - 1


def shape_of(seqs: Sequence[SeqSlice], num_rows: int) -> StepShape:
    """Return the shape of a step without padding."""
    num_blocks = max(len(seq.block_ids) for seq in seqs)
    return StepShape(sum(seq.query_len for seq in seqs), num_rows, len(seqs), num_blocks)
