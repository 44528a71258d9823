"""View a pool's bytes with numpy: find and copy the bytes of given tokens, layers and heads.

Cells    one box (layers, kv heads) of a pool: planes [block, layer x k|v, head, token, row], one of the rows and,
         for a quantized form, one of the scales
copy     between cells of one block size: block by block, neighbours as one run
staged   [layer x k|v, head, token, row], any token count: what cells of any block size are gathered into and
         scattered from
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvtransfer.errors import LayoutMismatch, ProtocolError
from kvtransfer.layout import LAYOUT_VERSION, STATE, Box, KVLayout, Range
from kvtransfer.naming import SPAN_TOKENS

STAGING_BYTES = 256 << 10  # stays in the second-level cache
# Rows are staged in parts of this size, which stay in the last-level cache (measured: 1.1 GB/s with 256 KiB, mostly
# Python's time, 3.5 GB/s with 2 MiB, as fast as memory).
CHUNK_BYTES = 2 << 20
_MAX_GROUP = 64  # buffers in one system call
_RUN_BYTES = 32 << 10  # neighbouring blocks are copied as runs if these average so much, else gathered

Staged = list[np.ndarray]  # one array per plane


class MemoryKernels(Protocol):
    """Native kernels over pools in host memory. Each is one call without Python per block, and gives the same result as
    numpy."""

    def copy_runs(self, target: np.ndarray, target_ids: np.ndarray, source: np.ndarray, source_ids: np.ndarray) -> None:
        """Copy blocks `source_ids` of one pool, uint8 [block, row, head, bytes], to `target_ids` of another."""

    def word_sums(
        self, words: np.ndarray, ids: np.ndarray, table: np.ndarray, starts: np.ndarray, target: np.ndarray | None,
        target_ids: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        """Sum words uint64 [block, row, head, unit, word] of blocks `ids`, each word times its weight, which are read
        from table[starts[block]] on. Return uint64 [len(ids), unit, row, head]. With a `target` of the same shape, also
        copy the words to its blocks `target_ids`."""
        ...


MOVABLE = ("paged", "latent")  # kinds of groups that can be moved, besides states


class Piece(NamedTuple):
    """Name blocks by their position in the handle, and the rows of each that belong to a range."""

    block_begin: int
    block_end: int
    row_begin: int
    row_end: int


def check_movable(layout: KVLayout) -> None:
    """Raise LayoutMismatch for a layout that this build cannot move."""
    paged = layout.groups if layout.state is None else layout.groups[:-1]
    sizes = {group.block_size for group in paged}
    if layout.version != LAYOUT_VERSION or len(sizes) != 1 or any(group.kind not in MOVABLE for group in paged):
        raise LayoutMismatch(
            f"only paged and latent groups of one block size, and one of states behind them, can be moved, not {layout}"
        )
    if layout.state is not None and layout.state.block_size != 1:
        raise LayoutMismatch(f"a state counts as one token, not {layout.state}")


def blocks_of(moved: Range, block_size: int) -> slice:
    """Return the blocks of a range, by their position in the handle."""
    return slice(moved.token_begin // block_size, -(-moved.token_end // block_size))


def pieces_of(moved: Range, block_size: int) -> list[Piece]:
    """Split a range into at most three pieces: the end of a block, whole blocks, the beginning of a block."""
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
    """Cut int64 ids [n], one array per pool, of blocks of `num_bytes` into parts: (begin, end, one selector per array).
    Selectors are slices where neighbours in all arrays make long runs (numpy copies these without Python per block),
    elsewhere index arrays whose blocks fit in a cache."""
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
    """View a pool, or one rank's shard, as numpy arrays; `layout` is that of the pool. For host memory `refresh`,
    `flush` and `expose` do nothing; pools.py overrides them for a pool on a GPU."""

    waits = False  # whether touching its bytes waits for a GPU, and so must run in a thread, however few bytes they are
    word_sums = None  # as MemoryKernels.word_sums, where words are not summed on the host

    def __init__(self, memory, layout: KVLayout, kernels: MemoryKernels | None = None):
        """View `memory` in `layout`; without `kernels` numpy copies and sums. Raises LayoutMismatch for a layout that
        cannot be moved."""
        check_movable(layout)
        self.kernels = kernels
        self.layout = layout
        flat = np.frombuffer(memory, np.uint8)
        # Blocks of a model without attention have ids and no bytes, so their number has no bound.
        self.num_blocks = len(flat) // layout.block_bytes if layout.block_bytes else np.iinfo(np.int64).max
        shape = (self.num_blocks if layout.block_bytes else 0, layout.block_bytes)
        self.blocks = flat[: shape[0] * shape[1]].reshape(shape)
        self.states = np.empty((0, 0), np.uint8)  # [block, bytes], the first one last in memory
        if num_bytes := layout.state_bytes:
            self.states = flat[len(flat) % num_bytes :].reshape(-1, num_bytes)[::-1]

    def check_ids(self, block_ids: Sequence[int] | np.ndarray, are_states: bool = False) -> np.ndarray:
        """Return the ids as int64 [n]. Raises ProtocolError for an id that is not in this pool."""
        array, count = np.asarray(block_ids, np.int64), len(self.states) if are_states else self.num_blocks
        if array.ndim != 1 or (array.size and (array.min() < 0 or array.max() >= count)):
            raise ProtocolError(f"block ids beyond a pool of {count} blocks")
        return array

    def refresh(self, view: np.ndarray, ids: np.ndarray) -> None:
        """Make blocks `ids`, int64 [n], of `view` [block, ...] ready to be read, before they are sent or shared."""

    def flush(self, view: np.ndarray, ids: np.ndarray) -> None:
        """Pass on blocks `ids`, int64 [n], of `view` [block, ...], after they were written and verified."""

    def expose(self, view: np.ndarray, ids: np.ndarray) -> None:
        """Make the bytes of blocks `ids`, int64 [n], of `view` [block, ...] readable here, from any memory."""


class Cells:
    """View one box of a pool. Block ids are int64 arrays with one id per block position of the prompt. Ranges number
    layers as in the whole model; every position of a range must be in the array."""

    def __init__(self, memory: BlockMemory, box: Box, first_layer: int):
        """View `box`, numbered as in the pool; `first_layer`: the number of its first layer in the whole model."""
        group = memory.layout.groups[box.group]
        self.memory = memory
        self.group = group
        self.form = group.form
        self.block_size = group.block_size
        self.first_layer = first_layer
        self.num_layers, self.num_heads, self._kinds = len(box.layers), len(box.heads), group.num_kinds
        self.is_state = group.kind == STATE
        self.is_whole = memory.layout.whole == (box,) and not self.is_state
        self.planes: list[np.ndarray] = []
        blocks, offset = memory.states, 0
        if not self.is_state:
            blocks, offset = memory.blocks, sum(each.block_bytes for each in memory.layout.groups[: box.group])
        for row_bytes in (group.row_bytes, group.row_scale_bytes):
            if row_bytes:
                shape = (self._kinds * group.num_layers, group.num_kv_heads, group.block_size, row_bytes)
                size = int(np.prod(shape))
                plane = blocks[:, offset : offset + size].reshape(len(blocks), *shape)
                layers = slice(self._kinds * box.layers.start, self._kinds * box.layers.stop)
                self.planes.append(plane[:, layers, box.heads.start : box.heads.stop])
                offset += size

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one token of one layer: K and V of all heads, with scales."""
        return self._kinds * self.num_heads * sum(plane.shape[-1] for plane in self.planes)

    def num_bytes(self, moved: Range) -> int:
        """Return the bytes of a range in this form."""
        return moved.num_tokens * (moved.layer_end - moved.layer_begin) * self.layer_bytes

    def each(self, ids: np.ndarray, moved: Range, do: Callable[[np.ndarray, np.ndarray], None]) -> None:
        """Call `do(view [block, ...], ids of its blocks int64 [n])` for exactly the bytes of the range; `ids`: one per
        block position."""
        for piece in pieces_of(moved, self.block_size):
            for view in self.views(piece, moved, self.is_whole):
                do(view, ids[piece.block_begin : piece.block_end])

    def layers(self, moved: Range) -> slice:
        """Return the range's layers as a slice of a plane's second axis."""
        begin, end = moved.layer_begin - self.first_layer, moved.layer_end - self.first_layer
        return slice(self._kinds * begin, self._kinds * end)

    def has_all_layers(self, moved: Range) -> bool:
        return moved.layer_end - moved.layer_begin == self.num_layers

    def views(self, piece: Piece, moved: Range, in_blocks: bool) -> list[np.ndarray]:
        """Return the piece's rows, uint8 [block, layer x k|v, head, row, bytes], one array per plane. With `in_blocks`,
        whole blocks of all layers are returned as one array [block, bytes]."""
        if in_blocks and self.has_all_layers(moved) and piece.row_end - piece.row_begin == self.block_size:
            return [self.memory.blocks]
        return [plane[:, self.layers(moved), :, piece.row_begin : piece.row_end] for plane in self.planes]

    def matches(self, other: "Cells") -> bool:
        """Return whether blocks can be copied between the two unchanged."""
        return (self.form, self.block_size) == (other.form, other.block_size)

    def copy_from(self, source: "Cells", own_ids: np.ndarray, source_ids: np.ndarray, moved: Range) -> None:
        """Copy the range's rows from `source`, which must match; both ids int64, one per block position."""
        in_blocks = self.is_whole and source.is_whole
        for piece in pieces_of(moved, self.block_size):
            ours, theirs = (ids[piece.block_begin : piece.block_end] for ids in (own_ids, source_ids))
            for target, origin in zip(self.views(piece, moved, in_blocks), source.views(piece, moved, in_blocks)):
                if (kernels := self.memory.kernels) is not None:
                    to, of = _runs(target, origin)
                    kernels.copy_runs(to, ours, of, theirs)
                    continue
                for _, _, (here, there) in selections(target[:1].nbytes, ours, theirs):
                    target[here] = origin[there]

    # ---- staged: the same for every block size ----

    def stage(self, moved: Range) -> Staged:
        """Allocate room for the range's rows, uint8 [layer x k|v, head, token, bytes] per plane."""
        layers, tokens = moved.layer_end - moved.layer_begin, moved.num_tokens
        return [
            np.empty((self._kinds * layers, self.num_heads, tokens, plane.shape[-1]), np.uint8) for plane in self.planes
        ]

    def gather(self, ids: np.ndarray, moved: Range, staged: Staged) -> Staged:
        """Copy the range's rows from blocks `ids`, int64, one per block position, into `staged` [layer x k|v, head,
        token, bytes], and return it."""
        for view, selector, run in self._staged_runs(ids, moved, staged):
            run[...] = view[selector]
        return staged

    def scatter(self, ids: np.ndarray, moved: Range, staged: Staged) -> None:
        """Copy `staged` [layer x k|v, head, token, bytes] to the range's rows in blocks `ids`, int64, one per block
        position."""
        for view, selector, run in self._staged_runs(ids, moved, staged):
            view[selector] = run

    def _staged_runs(self, ids: np.ndarray, moved: Range, staged: Staged) -> Iterator[tuple]:
        """Yield (rows of the pool, selector of their blocks, the same rows staged), both [block, layer x k|v, head,
        row, bytes]."""
        for piece in pieces_of(moved, self.block_size):
            own, rows = ids[piece.block_begin : piece.block_end], piece.row_end - piece.row_begin
            first = piece.block_begin * self.block_size + piece.row_begin - moved.token_begin
            for view, part in zip(self.views(piece, moved, False), staged):
                run = part[:, :, first : first + len(own) * rows]
                run = run.reshape(*run.shape[:2], len(own), rows, -1).transpose(2, 0, 1, 3, 4)
                for begin, end, (selector,) in selections(view[:1].nbytes, own):
                    yield view, selector, run[begin:end]

    def chunks(self, moved: Range) -> Iterator[Range]:
        return chunks(moved, self.layer_bytes)

    # ---- what travels ----

    def outgoing(self, ids: np.ndarray, moved: Range, in_blocks: bool) -> Iterator[list[memoryview]]:
        """Yield the range in wire order, in groups of buffers; `ids`: int64 [n], one per block position. With
        `in_blocks` (the taker's pool holds only this box, in blocks of the same size and form) whole blocks are sent as
        they are stored there: without a copy if this pool stores them so too, else staged."""
        for part, selectors in self._wire(ids, moved, in_blocks):
            if part is None:
                yield [memoryview(self._alone(selector)).cast("B") for selector in selectors]
            else:
                flat, staged = self._flat(part)
                self.gather(ids, part, staged)
                yield [memoryview(flat)]

    def incoming(self, ids: np.ndarray, moved: Range, in_blocks: bool) -> Iterator[list[memoryview]]:
        """Yield groups of buffers to fill, in the wire order of `outgoing`; `ids`: int64 [n], one per block position.
        The bytes of a group are in the pool when the next group is requested."""
        for part, selectors in self._wire(ids, moved, in_blocks):
            if part is not None:
                flat, staged = self._flat(part)
                yield [memoryview(flat)]
                self.scatter(ids, part, staged)
            elif isinstance(selectors[0], slice):
                yield [memoryview(self.memory.blocks[selector]).cast("B") for selector in selectors]
            else:
                staging = np.empty((len(selectors[0]), self.memory.layout.block_bytes), np.uint8)
                yield [memoryview(staging).cast("B")]
                self.memory.blocks[selectors[0]] = staging

    def _alone(self, selector: slice | np.ndarray) -> np.ndarray:
        """Return blocks, uint8 [block, bytes], as a pool that holds only this box would store them."""
        if self.is_whole:
            return self.memory.blocks[selector]
        rows = [plane[selector] for plane in self.planes]
        return np.concatenate([each.reshape(len(each), -1) for each in rows], 1)

    def _wire(self, ids: np.ndarray, moved: Range, in_blocks: bool) -> Iterator[tuple[Range | None, list]]:
        """Yield (a range to stage, no selectors) or (None, selectors of whole blocks: slices, or one index array)."""
        if not (in_blocks and self.has_all_layers(moved)):
            yield from ((part, []) for part in self.chunks(moved))
            return
        for piece in pieces_of(moved, self.block_size):
            if piece.row_end - piece.row_begin < self.block_size:
                first = piece.block_begin * self.block_size
                rest = moved._replace(token_begin=first + piece.row_begin, token_end=first + piece.row_end)
                yield from ((part, []) for part in self.chunks(rest))
                continue
            runs = []
            for _, _, (selector,) in selections(
                self.memory.layout.block_bytes, ids[piece.block_begin : piece.block_end]
            ):
                if not isinstance(selector, slice):
                    yield None, [selector]
                    continue
                runs.append(selector)
                if len(runs) == _MAX_GROUP:
                    yield None, runs
                    runs = []
            if runs:
                yield None, runs

    def _flat(self, part: Range) -> tuple[np.ndarray, Staged]:
        """Return one buffer, and the staged arrays of a range as views of it."""
        return flat_staged((self._kinds * (part.layer_end - part.layer_begin), self.num_heads, part.num_tokens),
                           [plane.shape[-1] for plane in self.planes])  # fmt: skip


def _runs(*views: np.ndarray) -> list[np.ndarray]:
    """Return views [block, bytes] or [block, layer x k|v, head, row, bytes] of several pools as [block, layer x k|v,
    head, bytes]. The rows of a head are contiguous; heads, and then layers, are merged into one run where they are
    contiguous in all pools."""
    if views[0].ndim == 2:
        return [view[:, None, None] for view in views]
    _, layers, heads, rows, row_bytes = views[0].shape
    num_bytes = rows * row_bytes
    if heads == 1 or all(view.strides[2] == num_bytes for view in views):
        heads, num_bytes = 1, heads * num_bytes
    if heads == 1 and (layers == 1 or all(view.strides[1] == num_bytes for view in views)):
        layers, num_bytes = 1, layers * num_bytes
    return [
        np.lib.stride_tricks.as_strided(view, (len(view), layers, heads, num_bytes), (*view.strides[:3], 1))
        for view in views
    ]


def flat_staged(shape: tuple[int, int, int], row_bytes: Sequence[int]) -> tuple[np.ndarray, Staged]:
    """Allocate one buffer uint8 [bytes] for planes of `shape` [layer x k|v, head, token], one after the other, with
    `row_bytes` per row; return it and the planes' views [layer x k|v, head, token, bytes]."""
    sizes = [int(np.prod(shape)) * each for each in row_bytes]
    flat = np.empty(sum(sizes), np.uint8)
    ends = np.cumsum(sizes).tolist()
    return flat, [flat[end - size : end].reshape(*shape, -1) for end, size in zip(ends, sizes)]


def chunks(moved: Range, layer_bytes: int) -> Iterator[Range]:
    """Split the range into parts of about CHUNK_BYTES, whole spans times whole layers; `layer_bytes`: the bytes of one
    token of one layer. Both sides send and receive staged rows in this order."""
    layers = max(1, CHUNK_BYTES // (SPAN_TOKENS * layer_bytes))
    spans = max(1, layers // max(1, moved.layer_end - moved.layer_begin))
    for token in range(moved.token_begin, moved.token_end, spans * SPAN_TOKENS):
        token_end = min(token + spans * SPAN_TOKENS, moved.token_end)
        for layer in range(moved.layer_begin, moved.layer_end, layers):
            yield Range(token, token_end, layer, min(layer + layers, moved.layer_end))
