"""What each rank of a worker has of its KV, where not all of them write one pool."""

from typing import NamedTuple, Protocol

from baton.engine.engine import Engine
from baton.engine.gpu_ranks.build import GpuRank
from baton.engine.parallel.shard import Shard
from baton.worker.ranks.listener import JoiningRank
from baton.worker.ranks.notes import LocalStream
from kvtransfer.layout import Box, KVLayout
from kvtransfer.memory.reshard import Sharding


class NoteStream(Protocol):
    """A way to another rank, for notes."""

    def note(self, told: dict) -> None: ...


class KVRank(NamedTuple):
    """Another rank than the first, with a pool of its own. `box`: what it gives of the model's KV; None: what it has, ranks
    before it have too."""

    stream: NoteStream
    box: Box | None


class RankPools(NamedTuple):
    """A worker's ranks with pools of their own. `sharding`: of the first one's pool; `joined` are on other hosts, `local` on GPUs of
    this one, of which each takes what crosses its part."""

    layout: KVLayout  # of the whole model
    sharding: Sharding | None  # None: the pool has all of it
    joined: list[JoiningRank]
    local: list[LocalStream]
    ranks: list[KVRank]

    @classmethod
    def of(cls, engine: Engine) -> "RankPools":
        """Return the group of an engine. Belongs to the event loop."""
        others = [] if engine.ranks is None else engine.ranks.others
        if joined := [rank for rank in others if isinstance(rank, JoiningRank)]:
            (group,) = engine.layout.groups
            heads = range(group.num_kv_heads)
            own = Sharding(engine.layout, ((Box(0, range(joined[0].layers.start), heads),),), in_whole_pool=True)
            return cls(
                engine.layout, own, joined, [], [KVRank(rank.stream, Box(0, rank.layers, heads)) for rank in joined]
            )
        if gpus := [rank for rank in others if isinstance(rank, GpuRank)]:
            layout = engine.spec.kv_layout(engine.config.kv_dtype, engine.config.block_size)
            streams = [LocalStream(rank.socket) for rank in gpus]
            boxes = gives(layout, gpus[0].shard)
            return cls(
                layout, sharding_of(layout, gpus[0].shard, 0), [], streams,
                [KVRank(stream, box) for stream, box in zip(streams, boxes[1:], strict=True)],
            )  # fmt: skip
        return cls(engine.layout, None, [], [], [])


def sharding_of(layout: KVLayout, shard: Shard, rank: int) -> Sharding:
    """Return what each rank's pool holds where each has its heads; `shard`: of any of them, `rank`: whose pool it is."""
    (group,) = layout.groups
    heads = (Shard(each, shard.degree).kv_heads(group.num_kv_heads) for each in range(shard.degree))
    return Sharding(layout, tuple((Box(0, range(group.num_layers), each),) for each in heads), rank)


def gives(layout: KVLayout, shard: Shard) -> list[Box | None]:
    """Return what each rank gives: heads that several have are the first one's."""
    boxes = [box for (box,) in sharding_of(layout, shard, 0).shards]
    return [box if box not in boxes[:rank] else None for rank, box in enumerate(boxes)]
