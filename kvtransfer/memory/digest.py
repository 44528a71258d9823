"""Digest cells of (layer, k|v, kv head, 64 tokens), in the form in which they travel.

    sum    = sum over the cell's words of word * weight[index of the word in the cell]      mod 2^64
    digest = mix(sum + mix(seed of the span + number of the (layer, k|v, kv head) in the whole model))

Words are little-endian unsigned integers of the wire form, 8 bytes wide, or the widest power of two that divides a row.
Weights are odd, so an error within one word is always found. Sums of parts of a cell add up to the sum of the cell, so
pools with different block sizes and head splits can be compared. This detects faults, not forgery: errors in the top
bits of two words can cancel. Tickets and TLS guard against forgery; without TLS, `sha256` (over the span's name, the
cell's number, its rows and its scales) detects it too, at the price of hashing.
"""

import functools
import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from baton.v1 import kv_pb2
from kvtransfer.errors import DigestMismatch, ProtocolError
from kvtransfer.layout import Box, KVLayout, Range
from kvtransfer.memory.blocks import Cells, Piece, Staged, pieces_of, selections
from kvtransfer.naming import SPAN_TOKENS

WordSums = Callable[..., np.ndarray]  # as MemoryKernels.word_sums
_SCALE_WEIGHTS = 1 << 32  # word indexes of scales start here


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 to uint64 [...]: a bijection that spreads every bit over all."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@functools.lru_cache(maxsize=64)
def weights(num_words: int, first: int = 0) -> np.ndarray:
    """Return the odd weights of the words `first` to `first + num_words` of a cell, uint64 [num_words], read-only."""
    table = mix64(np.arange(first, first + num_words, dtype=np.uint64)) | np.uint64(1)
    table.flags.writeable = False
    return table


def span_names(span_hashes: Sequence[bytes], chain_parent: bytes, num_tokens: int) -> list[bytes]:
    """Return 32 bytes for each span. An incomplete last span is named by the span before it and its length."""
    names = list(span_hashes)
    if tail := num_tokens % SPAN_TOKENS:
        names.append(hashlib.sha256(b"baton-tail-1" + chain_parent + struct.pack("<I", tail)).digest())
    return names


def cell_numbers(layout: KVLayout, box: Box, moved: Range) -> np.ndarray:
    """Return the numbers uint64 [cells] of the range's cells in this box of the whole model `layout`: one per (layer,
    k|v, kv head), in that order."""
    group = layout.groups[box.group]
    before = sum(each.num_kinds * each.num_layers * each.num_kv_heads for each in layout.groups[: box.group])
    first = layout.first_layer(box.group)
    kinds = group.num_kinds
    rows = np.arange(kinds * (moved.layer_begin - first), kinds * (moved.layer_end - first), dtype=np.uint64)
    heads = np.arange(box.heads.start, box.heads.stop, dtype=np.uint64)
    return (rows[:, None] * np.uint64(group.num_kv_heads) + heads + np.uint64(before)).ravel()


def num_spans(moved: Range) -> int:
    """Return how many spans a range touches."""
    return -(-moved.token_end // SPAN_TOKENS) - moved.token_begin // SPAN_TOKENS


class Digests:
    """Compute one kind of digests for the ranges of a dialogue, which begin and end at spans or at the prompt's end."""

    cell_bytes: int  # bytes of one digest
    reads_bytes = False  # whether it reads the bytes on the host, wherever the pool is

    def __init__(self, layout: KVLayout, box: Box, names: Sequence[bytes]):
        """Digest cells of `box`; `layout`: that of the whole model; `names`: of all spans of the prompt."""
        self._layout = layout
        self._box = box
        self._names = names

    def of_pool(self, cells: Cells, ids: np.ndarray, moved: Range) -> np.ndarray:
        """Return the digests [spans, cells, ...] of a range in a pool; `ids`: int64 [n], one per block position."""
        raise NotImplementedError

    def of_staged(self, staged: Staged, moved: Range) -> np.ndarray:
        """Return the digests [spans, cells, ...] of a range staged as [layer x k|v, head, token, bytes]."""
        raise NotImplementedError

    def copied(
        self, taker: Cells, source: Cells, own_ids: np.ndarray, source_ids: np.ndarray, moved: Range
    ) -> np.ndarray:
        """Copy between matching cells, both ids int64 [n]; return the digests [spans, cells, ...] of what was
        copied."""
        taker.copy_from(source, own_ids, source_ids, moved)
        return self.of_pool(taker, own_ids, moved)

    def of_parts(self, moved: Range, parts: Iterable[tuple[Range, Staged]]) -> np.ndarray:
        """Return the digests [spans, cells, ...] of a range staged in parts of whole spans and layers."""
        found, kinds = self.empty(moved), self._layout.groups[self._box.group].num_kinds
        for part, staged in parts:
            span = (part.token_begin - moved.token_begin) // SPAN_TOKENS
            digests = self.of_staged(staged, part)
            column = (part.layer_begin - moved.layer_begin) * kinds * len(self._box.heads)
            found[span : span + digests.shape[0], column : column + digests.shape[1]] = digests
        return found

    def empty(self, moved: Range) -> np.ndarray:
        """Allocate room for the range's digests [spans, cells, ...]."""
        raise NotImplementedError

    def write(self, digests: np.ndarray, ready: kv_pb2.Ready) -> None:
        """Write digests [spans, cells, ...] into a Ready frame."""
        raise NotImplementedError

    def read(self, ready: kv_pb2.Ready, moved: Range) -> np.ndarray:
        """Return the digests [spans, cells, ...] of a Ready frame. Raises DigestMismatch unless there is one for each
        cell."""
        raise NotImplementedError

    def shape(self, moved: Range) -> tuple[int, int]:
        """Return the numbers of spans and of cells in a range."""
        layers = moved.layer_end - moved.layer_begin
        return num_spans(moved), layers * self._layout.groups[self._box.group].num_kinds * len(self._box.heads)

    def _names_of(self, moved: Range) -> Sequence[bytes]:
        first = moved.token_begin // SPAN_TOKENS
        return self._names[first : first + num_spans(moved)]


class Sums(Digests):
    """Weighted sums: digests uint64 [spans, cells]."""

    cell_bytes = 8

    def of_pool(self, cells: Cells, ids: np.ndarray, moved: Range) -> np.ndarray:
        """Return the digests uint64 [spans, cells] of a range in a pool; `ids`: int64 [n], one per block position."""
        return self._mixed(cell_sums(cells, ids, moved), moved)

    def copied(
        self, taker: Cells, source: Cells, own_ids: np.ndarray, source_ids: np.ndarray, moved: Range
    ) -> np.ndarray:
        """Copy between matching cells, both ids int64 [n]; return the digests uint64 [spans, cells]. With kernels this
        is one pass."""
        if taker.memory.kernels is None:
            return super().copied(taker, source, own_ids, source_ids, moved)
        return self._mixed(cell_sums(source, source_ids, moved, taker, own_ids), moved)

    def of_staged(self, staged: Staged, moved: Range) -> np.ndarray:
        """Return the digests uint64 [spans, cells] of a range staged as [layer x k|v, head, token, bytes]."""
        return self._mixed(staged_sums(staged, moved.num_tokens), moved)

    def empty(self, moved: Range) -> np.ndarray:
        """Allocate room for the range's digests, uint64 [spans, cells]."""
        return np.empty(self.shape(moved), np.uint64)

    def write(self, digests: np.ndarray, ready: kv_pb2.Ready) -> None:
        """Write digests uint64 [spans, cells] into a Ready frame, in that order."""
        ready.digests.extend(digests.ravel().tolist())

    def read(self, ready: kv_pb2.Ready, moved: Range) -> np.ndarray:
        """Return the digests uint64 [spans, cells] of a Ready frame. Raises DigestMismatch for another number of
        digests."""
        shape = self.shape(moved)
        if len(ready.digests) != shape[0] * shape[1]:
            raise DigestMismatch(f"{len(ready.digests)} digests for {shape[0]} spans of {shape[1]} cells")
        return np.array(ready.digests, np.uint64).reshape(shape)

    def _mixed(self, sums: np.ndarray, moved: Range) -> np.ndarray:
        seeds = np.frombuffer(b"".join(name[:8] for name in self._names_of(moved)), "<u8").astype(np.uint64)
        return mix64(sums + mix64(seeds[:, None] + cell_numbers(self._layout, self._box, moved)))


class Hashes(Digests):
    """SHA-256: digests uint8 [spans, cells, 32]."""

    cell_bytes = 32
    reads_bytes = True

    def of_pool(self, cells: Cells, ids: np.ndarray, moved: Range) -> np.ndarray:
        """Return the digests uint8 [spans, cells, 32] of a range in a pool; `ids`: int64 [n], one per block
        position."""
        cells.each(ids, moved, cells.memory.expose)
        parts = cells.chunks(moved)
        return self.of_parts(moved, ((part, cells.gather(ids, part, cells.stage(part))) for part in parts))

    def of_staged(self, staged: Staged, moved: Range) -> np.ndarray:
        """Return the digests uint8 [spans, cells, 32] of a range staged as [layer x k|v, head, token, bytes]."""
        numbers = cell_numbers(self._layout, self._box, moved).tolist()
        found = self.empty(moved)
        for span, name in enumerate(self._names_of(moved)):
            tokens = slice(span * SPAN_TOKENS, min((span + 1) * SPAN_TOKENS, moved.num_tokens))
            planes = [np.ascontiguousarray(plane[:, :, tokens]).reshape(len(numbers), -1) for plane in staged]
            for cell, number in enumerate(numbers):
                digest = hashlib.sha256(name + struct.pack("<Q", number))
                for plane in planes:
                    digest.update(plane[cell])
                found[span, cell] = np.frombuffer(digest.digest(), np.uint8)
        return found

    def empty(self, moved: Range) -> np.ndarray:
        """Allocate room for the range's digests, uint8 [spans, cells, 32]."""
        return np.empty((*self.shape(moved), self.cell_bytes), np.uint8)

    def write(self, digests: np.ndarray, ready: kv_pb2.Ready) -> None:
        """Write digests uint8 [spans, cells, 32] into a Ready frame, in that order."""
        ready.hashes = digests.tobytes()

    def read(self, ready: kv_pb2.Ready, moved: Range) -> np.ndarray:
        """Return the digests uint8 [spans, cells, 32] of a Ready frame. Raises DigestMismatch for another number of
        digests."""
        shape = (*self.shape(moved), self.cell_bytes)
        if len(ready.hashes) != int(np.prod(shape)):
            raise DigestMismatch(f"{len(ready.hashes)} bytes of digests for {shape[0]} spans of {shape[1]} cells")
        return np.frombuffer(ready.hashes, np.uint8).reshape(shape)


KINDS: dict[str, type[Digests]] = {"sum": Sums, "sha256": Hashes}


def make_digests(kind: str, layout: KVLayout, box: Box, names: Sequence[bytes]) -> Digests:
    """Return the digests of `kind`. Raises ProtocolError for an unknown kind, since nothing is accepted without a
    digest."""
    if kind not in KINDS:
        raise ProtocolError(f"digest {kind!r}: one of {', '.join(KINDS)}")
    return KINDS[kind](layout, box, names)


# ---- sums ----


def staged_sums(staged: Staged, num_tokens: int) -> np.ndarray:
    """Return the sums uint64 [spans, cells] of rows staged as [layer x k|v, head, token, bytes]; the first token begins
    a span."""
    whole = num_tokens // SPAN_TOKENS
    cells = staged[0].shape[0] * staged[0].shape[1]
    sums = np.zeros((-(-num_tokens // SPAN_TOKENS), cells), np.uint64)
    for index, plane in enumerate(staged):
        dtype, row_words = word_of(plane.shape[-1])
        words = np.ascontiguousarray(plane).view(dtype).reshape(cells, -1)
        table = weights(SPAN_TOKENS * row_words, _SCALE_WEIGHTS if index else 0)
        border = whole * SPAN_TOKENS * row_words
        spans = words[:, :border].reshape(cells, whole, SPAN_TOKENS * row_words)
        sums[:whole] += np.einsum("csw,w->sc", spans, table, dtype=np.uint64)
        if border < words.shape[1]:
            sums[whole] += np.einsum("cw,w->c", words[:, border:], table[: words.shape[1] - border], dtype=np.uint64)
    return sums


def cell_sums(
    cells: Cells, ids: np.ndarray, moved: Range, taker: Cells | None = None, taker_ids: np.ndarray | None = None
) -> np.ndarray:
    """Return uint64 [spans that the range touches, cells of its layers]: the part of each cell's sum that lies within
    the range. Both ids int64 [n], one per block position. With a matching `taker`, also copy the summed bytes there."""
    rows = cells.layers(moved)
    kernels = (cells if taker is None else taker).memory.kernels
    sums = np.zeros((num_spans(moved), (rows.stop - rows.start) * cells.num_heads), np.uint64)
    for piece in _unit_pieces(moved, cells.block_size):
        for index, plane in enumerate(cells.planes):
            target = None if taker is None else (taker.planes[index][:, taker.layers(moved)], taker_ids)
            first_span = moved.token_begin // SPAN_TOKENS
            word_sums = cells.memory.word_sums
            if word_sums is None and kernels is not None and word_of(plane.shape[-1])[0].itemsize == 8:
                word_sums = kernels.word_sums
            _add_plane(sums, plane[:, rows], ids, piece, first_span, index > 0, target, word_sums)
    return sums


def _unit_pieces(moved: Range, block_size: int) -> list[Piece]:
    """Split the range into pieces whose rows are whole units (a unit is the smaller of block and span) or a part of one
    unit."""
    unit = min(block_size, SPAN_TOKENS)
    pieces = []
    for piece in pieces_of(moved, block_size):
        cuts = {piece.row_begin, piece.row_end}
        cuts.update(cut for cut in (-(-piece.row_begin // unit) * unit, piece.row_end // unit * unit)
                    if piece.row_begin < cut < piece.row_end)  # fmt: skip
        rows = sorted(cuts)
        pieces.extend(piece._replace(row_begin=a, row_end=b) for a, b in zip(rows, rows[1:]))
    return pieces


def _add_plane(
    sums: np.ndarray, plane: np.ndarray, ids: np.ndarray, piece: Piece, first_span: int, is_scale: bool,
    target: tuple[np.ndarray, np.ndarray] | None, word_sums: WordSums | None,
) -> None:  # fmt: skip
    """Add one plane [block, layer x k|v, head, row, bytes] of one piece to `sums` [spans, cells]. `target`: a plane and
    its block ids, to which the piece is copied. `word_sums`: the function that sums the words; None: numpy."""
    block_size, row_bytes = plane.shape[-2:]
    _, row_words = word_of(row_bytes)
    unit = min(block_size, SPAN_TOKENS)
    words = _words(plane, piece, unit)
    num_units, unit_words = words.shape[-2:]
    tokens = np.arange(piece.block_begin, piece.block_end) * block_size + piece.row_begin
    spans = (tokens[:, None] + np.arange(num_units) * unit) // SPAN_TOKENS - first_span  # [blocks, units]
    table = weights(SPAN_TOKENS * row_words, _SCALE_WEIGHTS if is_scale else 0)
    # One start per block: a block has several units only if they are spans, which all start at 0.
    starts = tokens % SPAN_TOKENS * row_words
    own = ids[piece.block_begin : piece.block_end]
    to = to_ids = None
    if target is not None:
        to, to_ids = _words(target[0], piece, unit), target[1][piece.block_begin : piece.block_end]
    if word_sums is not None:
        parts = word_sums(words, own, table, starts, to, to_ids)
    else:
        parts = np.empty((len(tokens), num_units, *words.shape[1:3]), np.uint64)
        num_bytes = sums.shape[1] * (piece.row_end - piece.row_begin) * row_bytes
        factors = table[starts[:, None] + np.arange(unit_words)]
        for low, high, (selector,) in selections(num_bytes, own):
            taken = words[selector]
            if to is not None:
                to[to_ids[low:high]] = taken
            np.einsum("blhuw,bw->bulh", taken, factors[low:high], dtype=np.uint64, out=parts[low:high])
    rows = spans.ravel()  # ascending, one span may have several units
    heads = np.flatnonzero(np.diff(rows, prepend=-1))
    sums[rows[heads]] += np.add.reduceat(parts.reshape(len(rows), -1), heads, axis=0)


def _words(plane: np.ndarray, piece: Piece, unit: int) -> np.ndarray:
    """Return the piece's rows as a view [block, layer x k|v, head, unit, words of a unit]."""
    dtype, row_words = word_of(plane.shape[-1])
    words = plane.view(dtype)[:, :, :, piece.row_begin : piece.row_end]
    unit_rows = min(unit, piece.row_end - piece.row_begin)
    shape = (*words.shape[:3], words.shape[3] // unit_rows, unit_rows * row_words)
    strides = (*words.strides[:3], unit_rows * words.strides[3], words.strides[4])
    return np.lib.stride_tricks.as_strided(words, shape, strides)


def word_of(row_bytes: int) -> tuple[np.dtype, int]:
    """Return the widest little-endian unsigned word that divides a row, and the number of words per row."""
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    return np.dtype(f"<u{size}"), row_bytes // size
