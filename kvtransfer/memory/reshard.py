"""Plan which ranks of a taker pull what from which ranks of a source, when the two are cut differently.

    source   rank 0: heads 0-3   rank 1: heads 4-7                     parts of the handle
    taker    rank 0: heads 0-1   rank 1: 2-3   rank 2: 4-5   rank 3: 6-7
    shares   (0 <- 0: heads 0-1)  (1 <- 0: 2-3)  (2 <- 1: 4-5)  (3 <- 1: 6-7)       one dialogue each

A share is the box of layers and heads that crosses from one part to one rank. Computed once per pair of workers.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.errors import LayoutMismatch, ProtocolError
from kvtransfer.layout import Box, KVLayout, Part
from kvtransfer.memory.blocks import BlockMemory, Cells
from kvtransfer.memory.byte_runs import BoxOfPool

Shard = tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Say which part of a whole model's KV (`layout`) each rank's pool holds (`shards`), and whose pool this is
    (`rank`). A worker of one rank holds everything: `Sharding.whole`. `in_whole_pool`: the pool has room for the whole
    model, and the rest is left empty; then only transports by which the source sends can find the bytes."""

    layout: KVLayout
    shards: tuple[Shard, ...]
    rank: int = 0
    in_whole_pool: bool = False

    @classmethod
    def whole(cls, layout: KVLayout) -> "Sharding":
        return cls(layout, (layout.whole,))

    @property
    def shard(self) -> Shard:
        return self.shards[self.rank]

    @property
    def pool_layout(self) -> KVLayout:
        """Return the layout of this rank's pool. Raises ValueError for boxes that are not in the model."""
        return self.layout if self.in_whole_pool else self.layout.cut(self.shard)

    def cells(self, memory: BlockMemory, box: Box) -> Cells:
        """Return the cells of `box`, numbered as in the whole model, in `memory`, this rank's pool. Raises
        ProtocolError if the pool does not hold the box."""
        return Cells(memory, self.place(box).box, self.layout.first_layer(box.group) + box.layers.start)

    def place(self, box: Box) -> BoxOfPool:
        """Return `box`, numbered as in the whole model, in the numbers of this rank's pool. Raises ProtocolError if the
        pool does not hold it."""
        for index, held in enumerate(self.shard):
            if held.group == box.group and contains(held.layers, box.layers) and contains(held.heads, box.heads):
                if box.layers and box.heads:
                    there = Box(index, _shift(box.layers, held.layers), _shift(box.heads, held.heads))
                    return BoxOfPool(self.pool_layout, box if self.in_whole_pool else there)
        raise ProtocolError(f"{box} is not in this pool, which holds {list(self.shard)}")


class Share(NamedTuple):
    """A box that crosses from one part to one rank. It is number `index` of the `num_shares` dialogues that this fetch
    has with the source rank that holds `part`."""

    part: Part
    box: Box
    index: int
    num_shares: int


@functools.lru_cache(maxsize=256)
def plan(parts: tuple[Part, ...], shards: tuple[Shard, ...], rank: int) -> tuple[Share, ...]:
    """Return the shares that `rank` of a taker with `shards` pulls. Raises LayoutMismatch if the parts lack some of its
    shard."""
    crossings = [
        (each, part, box) for each, shard in enumerate(shards) for held in shard for part, box in _cross(held, parts)
    ]
    totals = Counter(part.endpoints for _, part, _ in crossings)
    shares, seen = [], Counter()
    for each, part, box in crossings:
        if each == rank:
            shares.append(Share(part, box, seen[part.endpoints], totals[part.endpoints]))
        seen[part.endpoints] += 1
    return tuple(shares)


def _cross(wanted: Box, parts: Sequence[Part]) -> list[tuple[Part, Box]]:
    """Return `wanted` as boxes of the parts that hold them. Of several parts that hold the same, the first is taken."""
    layer_cuts = _cuts(wanted.layers, [part.layers for part in parts if part.group == wanted.group])
    head_cuts = _cuts(wanted.heads, [part.heads for part in parts if part.group == wanted.group])
    found: list[tuple[Part, Box]] = []
    for layers in layer_cuts:
        row: list[tuple[Part, Box]] = []
        for heads in head_cuts:
            part = _holder(Box(wanted.group, layers, heads), parts)
            if row and row[-1][0] is part:
                heads = range(row.pop()[1].heads.start, heads.stop)
            row.append((part, Box(wanted.group, layers, heads)))
        for part, box in row:
            above = next((i for i, (p, b) in enumerate(found) if p is part and _continues(b, box)), None)
            if above is None:
                found.append((part, box))
            else:
                found[above] = (part, box._replace(layers=range(found[above][1].layers.start, box.layers.stop)))
    return found


def _continues(above: Box, below: Box) -> bool:
    return above.heads == below.heads and above.layers.stop == below.layers.start


def _cuts(whole: range, others: Sequence[range]) -> list[range]:
    """Return `whole`, cut at the ends of the other ranges."""
    borders = {whole.start, whole.stop}
    borders.update(border for each in others for border in (each.start, each.stop) if border in whole)
    ends = sorted(borders)
    return [range(begin, end) for begin, end in zip(ends, ends[1:])]


def _holder(box: Box, parts: Sequence[Part]) -> Part:
    for part in parts:
        if part.group == box.group and contains(part.layers, box.layers) and contains(part.heads, box.heads):
            return part
    raise LayoutMismatch(f"no part of the source holds {box}; they hold {[part.box for part in parts]}")


def contains(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def sharding_of(part: Part, parts: Sequence[Part], layout: KVLayout) -> Sharding:
    """Return the sharding of the rank that holds `part`. Parts with the same endpoints belong to one rank. Groups
    without layers have no parts; every rank holds them."""
    empty = [box for box in layout.whole if not box.layers]
    return Sharding(layout, ((*empty, *(each.box for each in parts if each.endpoints == part.endpoints)),))


def _shift(inner: range, outer: range) -> range:
    return range(inner.start - outer.start, inner.stop - outer.start)
