"""What a (layer, k|v, kv head, 64 tokens) cell must add up to.

    sum    = sum over the cell's words of word * weight[index of the word in the cell]      mod 2^64
    digest = mix(sum + mix(seed of the span + index of the (layer, k|v, kv head)))

Words are little-endian unsigned integers of the wire form, 8 bytes wide, or the widest power of two that divides a row.
Weights are odd, so an error within one word is always found. Sums of parts of a cell add up to the sum of the cell:
two pools compare whatever their block sizes and head splits are. This finds faults, not forgers: two errors confined
to the top bits of two words can cancel. Forgery is the business of tickets and TLS.
"""

import functools
import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from kvtransfer.blocks import BlockMemory, Piece, Plane, pieces_of, selections
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.wire import Range

_SCALE_WEIGHTS = 1 << 32  # word indexes of scales start here


def mix64(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 over uint64: a bijection that spreads every bit over all."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@functools.lru_cache(maxsize=64)
def weights(num_words: int, first: int = 0) -> np.ndarray:
    """Odd uint64 weights of the words `first` to `first + num_words` of a cell."""
    table = mix64(np.arange(first, first + num_words, dtype=np.uint64)) | np.uint64(1)
    table.flags.writeable = False
    return table


def span_seeds(span_hashes: Sequence[bytes], chain_parent: bytes, num_tokens: int) -> np.ndarray:
    """uint64, one per span; that of the tail comes from the name of the span before it and the tail's length."""
    names = list(span_hashes)
    if tail := num_tokens % SPAN_TOKENS:
        names.append(hashlib.sha256(b"baton-tail-1" + chain_parent + struct.pack("<I", tail)).digest())
    return np.frombuffer(b"".join(name[:8] for name in names), "<u8").astype(np.uint64)


def cell_digests(memory: BlockMemory, ids: np.ndarray, moved: Range, seeds: np.ndarray) -> np.ndarray:
    """uint64 [spans of the range, cells of its layers]; `seeds` holds one per span of the whole prompt, and the
    range begins and ends on spans or at the prompt's end."""
    sums = cell_sums(memory, ids, moved)
    first_span = moved.token_begin // SPAN_TOKENS
    cells = np.arange(sums.shape[1], dtype=np.uint64) + np.uint64(num_cells(memory, 0, moved.layer_begin))
    keys = mix64(seeds[first_span : first_span + len(sums), None] + cells)
    return mix64(sums + keys)


def num_cells(memory: BlockMemory, layer_begin: int, layer_end: int) -> int:
    """Cells per span in a range of layers."""
    total = 0
    for plane in memory.planes:
        if not plane.is_scale:
            layers = min(layer_end - plane.first_layer, plane.num_layers) - max(layer_begin - plane.first_layer, 0)
            total += max(0, layers) * plane.cells_per_layer
    return total


def cell_sums(memory: BlockMemory, ids: np.ndarray, moved: Range) -> np.ndarray:
    """uint64 [spans that the range touches, cells of its layers]: the parts of the sums that lie in the range."""
    first_span, end_span = moved.token_begin // SPAN_TOKENS, -(-moved.token_end // SPAN_TOKENS)
    total = num_cells(memory, moved.layer_begin, moved.layer_end)
    sums = np.zeros((end_span - first_span, total), np.uint64)
    for piece in _unit_pieces(moved, memory.layout.block_size):
        column = 0
        for plane in memory.planes:
            first = max(moved.layer_begin - plane.first_layer, 0)
            last = min(moved.layer_end - plane.first_layer, plane.num_layers)
            if first < last:
                count = (last - first) * plane.cells_per_layer
                column -= count if plane.is_scale else 0  # scales count into the cells of their rows
                _add_plane(sums[:, column : column + count], memory, ids, piece, plane, first, first_span)
                column += count
    return sums


def _unit_pieces(moved: Range, block_size: int) -> list[Piece]:
    """Pieces whose rows are whole units (the smaller of a block and a span), or a part of one unit."""
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
    sums: np.ndarray, memory: BlockMemory, ids: np.ndarray, piece: Piece, plane: Plane, first: int, first_span: int
) -> None:
    """Adds one plane of one piece into `sums` [spans, cells]; `first`: first layer within the plane."""
    _, row_words = word_of(plane.row_bytes)
    unit = min(plane.block_size, SPAN_TOKENS)
    words = _words(memory, piece, plane, first, sums.shape[1])
    unit_words = words.shape[3]
    tokens = np.arange(piece.block_begin, piece.block_end) * plane.block_size + piece.row_begin
    spans = (tokens[:, None] + np.arange(words.shape[2]) * unit) // SPAN_TOKENS - first_span  # [blocks, units]
    table = weights(SPAN_TOKENS * row_words, _SCALE_WEIGHTS if plane.is_scale else 0)
    if len(tokens) == 1:
        start = int(tokens[0]) % SPAN_TOKENS * row_words
        factors = table[None, start : start + unit_words]
    else:  # whole blocks; a block has further units only where a unit is a span
        factors = table.reshape(-1, unit_words)[tokens % SPAN_TOKENS // unit]
    parts = np.empty((len(tokens), words.shape[2], sums.shape[1]), np.uint64)
    num_bytes = sums.shape[1] * (piece.row_end - piece.row_begin) * plane.row_bytes
    for low, high, (selector,) in selections(num_bytes, ids[piece.block_begin : piece.block_end]):
        np.einsum("bcuw,bw->buc", words[selector], factors[low:high], dtype=np.uint64, out=parts[low:high])
    rows = spans.ravel()  # ascending, one span may have several units
    heads = np.flatnonzero(np.diff(rows, prepend=-1))
    sums[rows[heads]] += np.add.reduceat(parts.reshape(len(rows), -1), heads, axis=0)


def _words(memory: BlockMemory, piece: Piece, plane: Plane, first: int, num_cells: int) -> np.ndarray:
    """A view [num_blocks, cells, units, words of a unit] of the piece's rows."""
    dtype, row_words = word_of(plane.row_bytes)
    begin = plane.offset + first * plane.cells_per_layer * plane.stride
    cells = memory.blocks[:, begin : begin + num_cells * plane.stride].view(dtype)
    cells = cells.reshape(memory.num_blocks, num_cells, plane.block_size * row_words)
    rows = cells[:, :, piece.row_begin * row_words : piece.row_end * row_words]
    unit_rows = min(plane.block_size, SPAN_TOKENS, piece.row_end - piece.row_begin)
    return rows.reshape(memory.num_blocks, num_cells, -1, unit_rows * row_words)


def word_of(row_bytes: int) -> tuple[np.dtype, int]:
    """The widest little-endian unsigned word that divides a row, and how many make a row."""
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    return np.dtype(f"<u{size}"), row_bytes // size
