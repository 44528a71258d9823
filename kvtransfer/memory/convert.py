"""Move a range from a source's pool into a taker's that keeps KV in other blocks or in another form.

                       same form                              a lossier one on the taker's side
    the taker reads    source ─ copy ─► pool ─ digest         source ─ gather ─ digest ─ encode ─► pool
    the source sends   pool ─ digest ─ send ─► pool ─ digest  pool ─ gather ─ encode ─ digest ─ send ─► pool ─ digest

Digests are made of the bytes that travel. Where the taker reads, these have the source's form, and the taker encodes
them after digesting: encoded rows would need memory of their own that both sides map. Where the source sends, it
encodes first, so that fewer bytes travel. The worker supplies the functions that encode.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kvtransfer.errors import LayoutMismatch, TransferFailed
from kvtransfer.layout import KVGroup, Range
from kvtransfer.memory.blocks import Cells, Staged, chunks, flat_staged
from kvtransfer.memory.digest import Digests

# (rows uint8 [n, row bytes], scales uint8 [n, scale bytes], source form, taker form) -> (rows, scales); n counts
# (layer, k|v, head, token) rows.
Codec = Callable[[np.ndarray, np.ndarray, str, str], tuple[np.ndarray, np.ndarray]]


class Encoded(NamedTuple):
    """A part of a range as it travels: one buffer, and the staged arrays as views of it."""

    part: Range
    flat: np.ndarray
    staged: Staged


def row_sizes(group: KVGroup) -> list[int]:
    """Return the bytes of a row (one token of one head) in each plane."""
    return [size for size in (group.row_bytes, group.row_scale_bytes) if size]


def convert(staged: Staged, source_form: str, group: KVGroup, codec: Codec | None) -> tuple[np.ndarray, Staged]:
    """Convert staged rows [layer x k|v, head, token, bytes] to the form of `group`; return a flat buffer uint8 [bytes]
    and its planes, staged likewise. Raises LayoutMismatch without a codec, TransferFailed if the codec returns wrong
    sizes."""
    if codec is None:
        raise LayoutMismatch(f"the source keeps {source_form}, the taker {group.form}: no codec was given to convert")
    shape = staged[0].shape[:3]
    count = int(np.prod(shape))
    rows = np.ascontiguousarray(staged[0]).reshape(count, -1)
    scales = np.ascontiguousarray(staged[1]).reshape(count, -1) if len(staged) > 1 else np.empty((count, 0), np.uint8)
    flat, encoded = flat_staged(shape, row_sizes(group))
    for target, origin in zip(encoded, codec(rows, scales, source_form, group.form)):
        if origin.size != target.size:
            raise TransferFailed(
                f"the codec from {source_form} to {group.form} gave {origin.size} bytes for {target.size}"
            )
        target[...] = origin.reshape(target.shape)
    return flat, encoded


def encode(cells: Cells, ids: np.ndarray, moved: Range, group: KVGroup, codec: Codec | None) -> list[Encoded]:
    """Encode the range of the source's pool in the taker's form, in the order in which it is sent; `ids`: int64 [n],
    one per block position. Raises what `convert` raises."""
    parts = []
    for part in chunks(moved, cells.group.num_kinds * cells.num_heads * sum(row_sizes(group))):
        staged = cells.gather(ids, part, cells.stage(part))
        parts.append(Encoded(part, *convert(staged, cells.form, group, codec)))
    return parts


def read(
    taker: Cells, source: Cells, own_ids: np.ndarray, source_ids: np.ndarray, moved: Range, digests: Digests,
    codec: Codec | None,
) -> np.ndarray:  # fmt: skip
    """Copy the range from mapped memory of the source into the taker's pool; return the digests [spans, cells, ...] of
    the bytes that were read. Both ids int64 [n], one per block position. Raises what `convert` raises."""
    if taker.matches(source):
        return digests.copied(taker, source, own_ids, source_ids, moved)
    if taker.form == source.form:
        for part in source.chunks(moved):
            taker.scatter(own_ids, part, source.gather(source_ids, part, source.stage(part)))
        return digests.of_pool(taker, own_ids, moved)
    return digests.of_parts(moved, _encoded_here(taker, source, own_ids, source_ids, moved, codec))


def _encoded_here(
    taker: Cells, source: Cells, own_ids: np.ndarray, source_ids: np.ndarray, moved: Range, codec: Codec | None
) -> Iterator[tuple[Range, Staged]]:
    for part in source.chunks(moved):
        staged = source.gather(source_ids, part, source.stage(part))
        _, encoded = convert(staged, source.form, taker.group, codec)
        taker.scatter(own_ids, part, encoded)
        yield part, staged
