"""Describe a range as runs of bytes in two pools whose blocks have one size and form; each may hold other layers and
heads. Neighbouring runs are merged, so that an engine that copies runs gets few. Computed in numpy, without Python per
block."""

from typing import NamedTuple

import numpy as np

from kvtransfer.errors import ProtocolError
from kvtransfer.layout import Box, KVLayout, Range
from kvtransfer.memory.blocks import pieces_of

SOURCE, OWN, WIDTH, SOURCE_PITCH, OWN_PITCH, HEIGHT = range(6)  # columns of an array of runs


class BoxOfPool(NamedTuple):
    """A box of a pool, numbered as in that pool."""

    layout: KVLayout
    box: Box

    @property
    def is_whole(self) -> bool:
        return self.layout.whole == (self.box,)


class _Plane(NamedTuple):
    """Locate rows, or their scales, in one block: `width` contiguous bytes for each of `heads` in each of `layers` (k
    and v count as two)."""

    offset: int
    width: int
    layers: int
    layer_stride: int
    heads: int
    head_stride: int


def merged_runs(
    source: BoxOfPool, own: BoxOfPool, source_ids: np.ndarray, own_ids: np.ndarray, moved: Range
) -> np.ndarray:
    """Return runs int64 [n, 6]: byte offsets in the source's and the own pool, then `width`, the two pitches, and
    `height`. A run is `width` bytes at each of `height` places, which are a pitch apart in each pool. Both boxes have
    one size; `moved` counts layers from their first one. Both ids int64 [m], one per block position."""
    found = [np.empty((0, 6), np.int64)]
    for piece in pieces_of(moved, own.layout.block_size):
        strips = np.array(_strips(source, own, moved, piece.row_begin, piece.row_end), np.int64).reshape(-1, 6)
        blocks = slice(piece.block_begin, piece.block_end)
        runs = np.empty((piece.block_end - piece.block_begin, len(strips), 6), np.int64)
        for column, ids, pool in ((SOURCE, source_ids, source), (OWN, own_ids, own)):
            runs[:, :, column] = ids[blocks, None] * pool.layout.block_bytes + strips[None, :, column]
        runs[:, :, WIDTH:] = strips[None, :, WIDTH:]
        found.append(runs.reshape(-1, 6))
    return _merged(np.concatenate(found))


def check_within(runs: np.ndarray, num_bytes: int) -> None:
    """Raise ProtocolError if `runs`, int64 [n, 6] of merged_runs, go beyond a source's pool of `num_bytes`."""
    ends = runs[:, SOURCE] + (runs[:, HEIGHT] - 1) * runs[:, SOURCE_PITCH] + runs[:, WIDTH]
    if len(runs) and (runs[:, SOURCE].min() < 0 or ends.max() > num_bytes):
        raise ProtocolError(f"block ids beyond a pool of {num_bytes} bytes")


def single_rows(runs: np.ndarray) -> np.ndarray:
    """Return int64 [m, 3]: source offset, own offset, bytes. Each place of `runs` [n, 6] becomes one row, for engines
    without pitches."""
    steps = np.arange(runs[:, HEIGHT].sum()) - np.repeat(np.cumsum(runs[:, HEIGHT]) - runs[:, HEIGHT], runs[:, HEIGHT])
    repeated = np.repeat(runs, runs[:, HEIGHT], axis=0)
    pitches = ((SOURCE, SOURCE_PITCH), (OWN, OWN_PITCH))
    offsets = [repeated[:, column] + steps * repeated[:, pitch] for column, pitch in pitches]
    return np.stack([*offsets, repeated[:, WIDTH]], 1)


def _strips(source: BoxOfPool, own: BoxOfPool, moved: Range, row_begin: int, row_end: int) -> list[tuple[int, ...]]:
    """Return the runs of these rows and the range's layers in block 0 of both pools. A whole block is one run."""
    is_all = (moved.layer_begin, moved.layer_end, row_begin) == (0, len(own.box.layers), 0)
    if is_all and row_end == own.layout.block_size and source.is_whole and own.is_whole:
        width = own.layout.block_bytes
        return [(0, 0, width, width, width, 1)]
    pairs = zip(*(_planes(each, moved, row_begin, row_end) for each in (source, own)), strict=True)
    return [run for there, here in pairs for run in _runs_of(there, here)]


def _planes(pool: BoxOfPool, moved: Range, row_begin: int, row_end: int) -> list[_Plane]:
    group, heads = pool.layout.groups[pool.box.group], pool.box.heads
    offset = sum(each.block_bytes for each in pool.layout.groups[: pool.box.group])
    planes: list[_Plane] = []
    first, count = pool.box.layers.start + moved.layer_begin, moved.layer_end - moved.layer_begin
    for row_bytes in (group.row_bytes, group.row_scale_bytes):
        head_stride = group.block_size * row_bytes
        layer_stride = group.num_kv_heads * head_stride
        if count > 0 and row_bytes:
            begin = offset + first * group.num_kinds * layer_stride + heads.start * head_stride + row_begin * row_bytes
            width = (row_end - row_begin) * row_bytes
            planes.append(_Plane(begin, width, count * group.num_kinds, layer_stride, len(heads), head_stride))
        offset += group.num_layers * group.num_kinds * layer_stride
    return planes


def _runs_of(there: _Plane, here: _Plane) -> list[tuple[int, ...]]:
    width, layers, heads = here.width, here.layers, here.heads
    strides = [(each.layer_stride, each.head_stride) for each in (there, here)]
    if all(by_head == width for _, by_head in strides):  # the rows of all heads are contiguous
        width, heads = width * heads, 1
    elif all(by_layer == heads * by_head for by_layer, by_head in strides):
        # The heads of all layers are places with one pitch.
        layers, heads = layers * heads, 1
        strides = [(by_head, by_head) for _, by_head in strides]
    if heads == 1 and all(by_layer == width for by_layer, _ in strides):
        width, layers = width * layers, 1
        strides = [(width, width)] * 2
    (pitch_there, by_head_there), (pitch_here, by_head_here) = strides
    return [
        (there.offset + head * by_head_there, here.offset + head * by_head_here, width, pitch_there, pitch_here, layers)
        for head in range(heads)
    ]


def _merged(runs: np.ndarray) -> np.ndarray:
    """Return the runs with those of one place joined where they follow each other in both pools."""
    if len(runs) < 2:
        return runs
    ends = runs[:-1, (SOURCE, OWN)] + runs[:-1, WIDTH, None]
    joined = (ends == runs[1:, (SOURCE, OWN)]).all(1) & (runs[:-1, HEIGHT] == 1) & (runs[1:, HEIGHT] == 1)
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    merged = runs[heads]
    merged[:, WIDTH] = np.add.reduceat(runs[:, WIDTH], heads)
    single = merged[:, HEIGHT] == 1
    merged[single, SOURCE_PITCH] = merged[single, OWN_PITCH] = merged[single, WIDTH]
    return merged
