"""A range as runs of bytes of two pools of one layout: neighbours merged, so that an engine which moves runs of bytes
gets few of them. Computed in numpy, no Python per block."""

import numpy as np

from kvtransfer.errors import ProtocolError
from kvtransfer.layout import KVLayout
from kvtransfer.memory.blocks import pieces_of
from kvtransfer.wire import Range

SOURCE, OWN, WIDTH, PITCH, HEIGHT = range(5)  # columns of an array of runs


def merged_runs(layout: KVLayout, source_ids: np.ndarray, own_ids: np.ndarray, moved: Range) -> np.ndarray:
    """Return int64 [n, 5]: byte offsets in the source's pool and in one's own, `width` bytes at each of `height` places
    that are `pitch` bytes apart in both. Both ids int64 [m], one per block position of the prompt."""
    found = [np.empty((0, 5), np.int64)]
    for piece in pieces_of(moved, layout.block_size):
        strips = np.array(_strips(layout, moved, piece.row_begin, piece.row_end), np.int64).reshape(-1, 4)
        blocks = slice(piece.block_begin, piece.block_end)
        runs = np.empty((piece.block_end - piece.block_begin, len(strips), 5), np.int64)
        for column, ids in ((SOURCE, source_ids), (OWN, own_ids)):
            runs[:, :, column] = ids[blocks, None] * layout.block_bytes + strips[None, :, 0]
        runs[:, :, WIDTH:] = strips[None, :, 1:]
        found.append(runs.reshape(-1, 5))
    return _merged(np.concatenate(found))


def check_within(runs: np.ndarray, num_bytes: int) -> None:
    """Raise ProtocolError if `runs`, int64 [n, 5] of merged_runs, leave a source's pool of `num_bytes`."""
    ends = runs[:, SOURCE] + (runs[:, HEIGHT] - 1) * runs[:, PITCH] + runs[:, WIDTH]
    if len(runs) and (runs[:, SOURCE].min() < 0 or ends.max() > num_bytes):
        raise ProtocolError(f"block ids beyond a pool of {num_bytes} bytes")


def single_rows(runs: np.ndarray) -> np.ndarray:
    """Return int64 [m, 3]: source offset, own offset, bytes, one per place of `runs` [n, 5], for engines that take no
    pitch."""
    steps = np.arange(runs[:, HEIGHT].sum()) - np.repeat(np.cumsum(runs[:, HEIGHT]) - runs[:, HEIGHT], runs[:, HEIGHT])
    repeated = np.repeat(runs, runs[:, HEIGHT], axis=0)
    offsets = [repeated[:, column] + steps * repeated[:, PITCH] for column in (SOURCE, OWN)]
    return np.stack([*offsets, repeated[:, WIDTH]], 1)


def _strips(layout: KVLayout, moved: Range, row_begin: int, row_end: int) -> list[tuple[int, int, int, int]]:
    """(offset in a block, width, pitch, height) of the rows in the range's layers; a whole block is one."""
    num_layers = sum(group.num_layers for group in layout.groups)
    if (moved.layer_begin, moved.layer_end) == (0, num_layers) and (row_begin, row_end) == (0, layout.block_size):
        return [(0, layout.block_bytes, layout.block_bytes, 1)]
    strips, offset, first_layer = [], 0, 0
    for group in layout.groups:
        first = max(moved.layer_begin - first_layer, 0)
        count = min(moved.layer_end - first_layer, group.num_layers) - first
        for row_bytes in (group.row_bytes, group.row_scale_bytes):
            cells = group.num_kinds * group.num_kv_heads
            pitch = group.block_size * row_bytes
            if count > 0 and row_bytes:
                begin = offset + first * cells * pitch + row_begin * row_bytes
                strips.append((begin, (row_end - row_begin) * row_bytes, pitch, count * cells))
            offset += group.num_layers * cells * pitch
        first_layer += group.num_layers
    return [(begin, width * height, width * height, 1) if width == pitch else (begin, width, pitch, height)
            for begin, width, pitch, height in strips]  # fmt: skip


def _merged(runs: np.ndarray) -> np.ndarray:
    """Runs of one place each that follow each other in both pools, as one."""
    if len(runs) < 2:
        return runs
    ends = runs[:-1, (SOURCE, OWN)] + runs[:-1, WIDTH, None]
    joined = (ends == runs[1:, (SOURCE, OWN)]).all(1) & (runs[:-1, HEIGHT] == 1) & (runs[1:, HEIGHT] == 1)
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    merged = runs[heads]
    merged[:, WIDTH] = np.add.reduceat(runs[:, WIDTH], heads)
    single = merged[:, HEIGHT] == 1
    merged[single, PITCH] = merged[single, WIDTH]
    return merged
