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
    """`layout`: of a whole model's KV; `shards`: what each rank's pool holds of it; `rank`: whose pool this is. A
    worker of one rank holds everything: `Sharding.whole`. `in_whole_pool`: the pool has room for the whole model, in
    which the rest is left empty; only transports by which the source sends know where to find what is there."""

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
        """Return `box` of the whole model in this rank's pool, `memory`. Raises ProtocolError where it is not there."""
        return Cells(memory, self.place(box).box, self.layout.first_layer(box.group) + box.layers.start)

    def place(self, box: Box) -> BoxOfPool:
        """Return where in this rank's pool `box` of the whole model is. Raises ProtocolError where it is not there."""
        for index, held in enumerate(self.shard):
            if held.group == box.group and contains(held.layers, box.layers) and contains(held.heads, box.heads):
                if box.layers and box.heads:
                    there = Box(index, _shift(box.layers, held.layers), _shift(box.heads, held.heads))
                    return BoxOfPool(self.pool_layout, box if self.in_whole_pool else there)
        raise ProtocolError(f"{box} is not in this pool, which holds {list(self.shard)}")


class Share(NamedTuple):
    """`index` of `num_shares`: which of the dialogues that this fetch has with the source rank that holds `part`."""

    part: Part
    box: Box
    index: int
    num_shares: int


@functools.lru_cache(maxsize=256)
def plan(parts: tuple[Part, ...], shards: tuple[Shard, ...], rank: int) -> tuple[Share, ...]:
    """Return what `rank` of a taker cut into `shards` pulls. Raises LayoutMismatch when the parts lack some of it."""
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
    """`wanted` as boxes out of parts; what several parts hold comes from the first."""
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
    """Return `whole`, cut at each begin and end of the others."""
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
    """Return what the rank holds which `part` belongs to: a rank is known by its endpoints. Groups without layers have
    no parts, and every rank."""
    empty = [box for box in layout.whole if not box.layers]
    return Sharding(layout, ((*empty, *(each.box for each in parts if each.endpoints == part.endpoints)),))


def _shift(inner: range, outer: range) -> range:
    return range(inner.start - outer.start, inner.stop - outer.start)
