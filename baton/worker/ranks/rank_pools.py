"""Say which part of the KV each rank of a worker holds, if ranks have pools of their own."""

from typing import NamedTuple, Protocol

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_spec import ModelSpec
from baton.engine.engine import Engine
from baton.engine.gpu_ranks.build import GpuRank
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.stage import cut_layers
from baton.worker.ranks.listener import JoiningRank
from baton.worker.ranks.notes import LocalStream
from kvtransfer.layout import Box, KVLayout
from kvtransfer.memory.reshard import Sharding


class NoteStream(Protocol):
    """A stream of notes to another rank."""

    def send_note(self, note: dict) -> None:
        """Send a note; it is lost if the other end is gone."""
        ...


class KVRank(NamedTuple):
    """Another rank than the first, with a pool of its own. `box`: the part of the model's KV that it gives; None if
    earlier ranks hold the same."""

    stream: NoteStream
    box: Box | None


class RankPools(NamedTuple):
    """The ranks of a worker that have pools of their own. `sharding`: of the first rank's pool; `joined`: ranks on
    other hosts; `local`: ranks on GPUs of this host, which pull their parts themselves; `ranks`: all of these."""

    sharding: Sharding
    joined: list[JoiningRank]
    local: list[LocalStream]
    ranks: list[KVRank]

    @classmethod
    def of(cls, engine: Engine) -> "RankPools":
        """Return the ranks of an engine. Called in the event loop."""
        others = [] if engine.ranks is None else engine.ranks.others
        if joined := [rank for rank in others if isinstance(rank, JoiningRank)]:
            (group,) = engine.layout.groups
            heads = range(group.num_kv_heads)
            own = Sharding(engine.layout, ((Box(0, range(joined[0].layers.start), heads),),), in_whole_pool=True)
            return cls(own, joined, [], [KVRank(rank.stream, Box(0, rank.layers, heads)) for rank in joined])
        if gpus := [rank for rank in others if isinstance(rank, GpuRank)]:
            layout = engine.spec.kv_layout(engine.config.kv_dtype, engine.config.block_size)
            streams = [LocalStream(rank.socket) for rank in gpus]
            sharding = sharding_of(layout, engine.config, engine.spec, 0)
            ranks = [KVRank(stream, box) for stream, box in zip(streams, gives(sharding)[1:], strict=True)]
            return cls(sharding, [], streams, ranks)
        return cls(Sharding.whole(engine.layout), [], [], [])


def sharding_of(layout: KVLayout, config: EngineConfig, spec: ModelSpec, rank: int) -> Sharding:
    """Return which part each rank's pool holds, heads or layers, of a model whose layers all have KV; `rank`: whose
    pool it is."""
    (group,) = layout.groups
    heads, layers = range(group.num_kv_heads), range(group.num_layers)
    if config.pipeline_parallel > 1:
        boxes = [Box(0, stage.layers, heads) for stage in cut_layers(spec, config.pipeline_parallel)]
    else:
        shards = (Shard(each, config.tensor_parallel) for each in range(config.tensor_parallel))
        boxes = [Box(0, layers, shard.kv_heads(len(heads))) for shard in shards]
    return Sharding(layout, tuple((box,) for box in boxes), rank)


def gives(sharding: Sharding) -> list[Box | None]:
    """Return the box that each rank gives. Of several ranks that hold the same heads, the first gives them."""
    boxes = [box for (box,) in sharding.shards]
    return [box if box not in boxes[:rank] else None for rank, box in enumerate(boxes)]
