"""A pool's bytes as numpy views: which of them belong to tokens times layers, and how they are copied.

A plane is a run of equal cells, one per (layer, k|v, kv head), within a block: the rows of a group, or its scales.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtransfer.errors import LayoutMismatch, ProtocolError
from kvtransfer.layout import LAYOUT_VERSION, SCALE_BYTES, KVLayout
from kvtransfer.wire import Range

STAGING_BYTES = 256 << 10  # stays in the second-level cache
_MAX_GROUP = 64  # buffers in one system call
_RUN_BYTES = 32 << 10  # neighbours that make so much on average are copied run by run, others gathered


class Plane(NamedTuple):
    offset: int  # bytes from the start of the block
    first_layer: int  # counted over all groups
    num_layers: int
    cells_per_layer: int  # 2 * kv heads
    block_size: int
    row_bytes: int  # one token of one cell
    is_scale: bool

    @property
    def stride(self) -> int:
        return self.block_size * self.row_bytes


class Piece(NamedTuple):
    """Blocks by position in the handle, and the rows of each that belong to a range."""

    block_begin: int
    block_end: int
    row_begin: int
    row_end: int


class Strip(NamedTuple):
    """The same bytes of many blocks: `num_cells` cells from `offset` on, of each the bytes `begin` to `end`."""

    offset: int
    num_cells: int
    stride: int
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.num_cells * (self.end - self.begin)


def planes_of(layout: KVLayout) -> tuple[Plane, ...]:
    """Raises LayoutMismatch for a layout that this build cannot move."""
    sizes = {group.block_size for group in layout.groups}
    if layout.version != LAYOUT_VERSION or len(sizes) != 1 or any(group.kind != "paged" for group in layout.groups):
        raise LayoutMismatch(f"only paged groups of one block size can be moved, not {layout}")
    planes, offset, layer = [], 0, 0
    for group in layout.groups:
        shape = (layer, group.num_layers, 2 * group.num_kv_heads, group.block_size)
        planes.append(Plane(offset, *shape, group.row_bytes, False))
        if group.scale_bytes:
            planes.append(Plane(offset + group.head_bytes, *shape, SCALE_BYTES[group.form], True))
        offset += group.block_bytes
        layer += group.num_layers
    return tuple(planes)


def pieces_of(moved: Range, block_size: int) -> list[Piece]:
    """A range as at most three pieces: the rest of a block, whole blocks, the beginning of a block."""
    pieces, token = [], moved.token_begin
    if token % block_size and token < moved.token_end:
        block = token // block_size
        end = min(moved.token_end, (block + 1) * block_size)
        pieces.append(Piece(block, block + 1, token % block_size, end - block * block_size))
        token = end
    whole, rest = moved.token_end // block_size, moved.token_end % block_size
    if token < whole * block_size:
        pieces.append(Piece(token // block_size, whole, 0, block_size))
        token = whole * block_size
    if token < moved.token_end:
        pieces.append(Piece(whole, whole + 1, 0, rest))
    return pieces


def selections(num_bytes: int, *ids: np.ndarray) -> Iterator[tuple[int, int, list]]:
    """Cuts blocks of `num_bytes` each into (begin, end, one selector per array of `ids`): slices where neighbours in
    every array make long runs (numpy copies them without Python per block), elsewhere index arrays that fit a cache."""
    count = len(ids[0])
    breaks = np.zeros(max(0, count - 1), bool)
    for array in ids:
        breaks |= np.diff(array) != 1
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), count]
    if count * num_bytes >= _RUN_BYTES * (len(cuts) - 1):
        for begin, end in zip(cuts, cuts[1:]):
            yield begin, end, [slice(int(array[begin]), int(array[begin]) + end - begin) for array in ids]
        return
    step = max(1, STAGING_BYTES // num_bytes)
    for begin in range(0, count, step):
        yield begin, min(begin + step, count), [array[begin : begin + step] for array in ids]


class BlockMemory:
    """A pool as numpy sees it. Block ids are int64 arrays, one per block position; ranges are cut by the callers so
    that every position is in the array."""

    def __init__(self, memory, layout: KVLayout):
        self.layout = layout
        self.planes = planes_of(layout)
        self.num_layers = sum(group.num_layers for group in layout.groups)
        flat = np.frombuffer(memory, np.uint8)
        self.num_blocks = len(flat) // layout.block_bytes
        self.blocks = flat[: self.num_blocks * layout.block_bytes].reshape(self.num_blocks, layout.block_bytes)

    def check_ids(self, block_ids: Sequence[int]) -> np.ndarray:
        """As an int64 array. Raises ProtocolError for a block that is not in this pool."""
        array = np.asarray(block_ids, np.int64)
        if array.ndim != 1 or (array.size and (array.min() < 0 or array.max() >= self.num_blocks)):
            raise ProtocolError(f"block ids beyond a pool of {self.num_blocks} blocks")
        return array

    def num_bytes(self, moved: Range) -> int:
        """What travels for a range: valid rows only."""
        layers = (moved.layer_begin, moved.layer_end)
        return sum(strip.num_bytes for strip in self.strips(layers, 0, 1)) * moved.num_tokens

    def strips(self, layers: tuple[int, int], row_begin: int, row_end: int) -> list[Strip]:
        """Whole blocks of all layers are one strip of one cell."""
        if layers == (0, self.num_layers) and (row_begin, row_end) == (0, self.layout.block_size):
            size = self.layout.block_bytes
            return [Strip(0, 1, size, 0, size)]
        strips = []
        for plane in self.planes:
            first = max(layers[0] - plane.first_layer, 0)
            last = min(layers[1] - plane.first_layer, plane.num_layers)
            if first < last:
                offset = plane.offset + first * plane.cells_per_layer * plane.stride
                rows = (row_begin * plane.row_bytes, row_end * plane.row_bytes)
                strips.append(Strip(offset, (last - first) * plane.cells_per_layer, plane.stride, *rows))
        return strips

    def view(self, strip: Strip) -> np.ndarray:
        """[num_blocks, num_cells, bytes], no copy."""
        cells = self.blocks[:, strip.offset : strip.offset + strip.num_cells * strip.stride]
        return cells.reshape(self.num_blocks, strip.num_cells, strip.stride)[:, :, strip.begin : strip.end]

    def copy_from(self, source: "BlockMemory", own_ids: np.ndarray, source_ids: np.ndarray, moved: Range) -> None:
        """The range's rows out of `source`, a pool of the same layout."""
        layers = (moved.layer_begin, moved.layer_end)
        for piece in pieces_of(moved, self.layout.block_size):
            ours, theirs = (ids[piece.block_begin : piece.block_end] for ids in (own_ids, source_ids))
            for strip in self.strips(layers, piece.row_begin, piece.row_end):
                target, origin = self.view(strip), source.view(strip)
                for _, _, (here, there) in selections(strip.num_bytes, ours, theirs):
                    target[here] = origin[there]

    def outgoing(self, ids: np.ndarray, moved: Range) -> Iterator[list[memoryview]]:
        """The range in wire order (pieces, blocks, strips), in groups of buffers: long runs of whole blocks as they
        lie, the rest gathered."""
        for strips, selectors, count in self._groups(ids, moved):
            if not count:
                yield [memoryview(self.blocks[selector]).cast("B") for selector in selectors]
                continue
            staging = np.empty((count, sum(strip.num_bytes for strip in strips)), np.uint8)
            for strip, part in self._parts(strips, staging):
                part[...] = self.view(strip)[selectors[0]]
            yield [memoryview(staging).cast("B")]

    def incoming(self, ids: np.ndarray, moved: Range) -> Iterator[list[memoryview]]:
        """Groups of buffers to be filled, the wire order of `outgoing`; what was filled is in its place as soon as the
        next group is asked for."""
        for strips, selectors, count in self._groups(ids, moved):
            if not count:
                yield [memoryview(self.blocks[selector]).cast("B") for selector in selectors]
                continue
            staging = np.empty((count, sum(strip.num_bytes for strip in strips)), np.uint8)
            yield [memoryview(staging).cast("B")]
            for strip, part in self._parts(strips, staging):
                self.view(strip)[selectors[0]] = part

    def _groups(self, ids: np.ndarray, moved: Range) -> Iterator[tuple[list[Strip], list, int]]:
        """(strips, selectors, blocks to stage); none to stage where every selector is a run of whole blocks."""
        layers = (moved.layer_begin, moved.layer_end)
        for piece in pieces_of(moved, self.layout.block_size):
            strips = self.strips(layers, piece.row_begin, piece.row_end)
            own = ids[piece.block_begin : piece.block_end]
            num_bytes = sum(strip.num_bytes for strip in strips)
            in_place = []
            for begin, end, (selector,) in selections(num_bytes, own):
                if isinstance(selector, slice) and num_bytes == self.layout.block_bytes:
                    in_place.append(selector)
                    if len(in_place) == _MAX_GROUP:
                        yield strips, in_place, 0
                        in_place = []
                    continue
                step = max(1, STAGING_BYTES // num_bytes)
                for first in range(begin, end, step):
                    yield strips, [own[first : min(first + step, end)]], min(first + step, end) - first
            if in_place:
                yield strips, in_place, 0

    @staticmethod
    def _parts(strips: list[Strip], staging: np.ndarray) -> Iterator[tuple[Strip, np.ndarray]]:
        offset = 0
        for strip in strips:
            part = staging[:, offset : offset + strip.num_bytes]
            yield strip, part.reshape(len(staging), strip.num_cells, strip.end - strip.begin)
            offset += strip.num_bytes
