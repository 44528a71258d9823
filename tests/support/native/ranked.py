"""The ranks of one model as threads of this process, over memory that they share as processes do."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from baton.engine.core.config import EngineConfig
from baton.engine.kv.pool import CPU, KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import follow
from baton.engine.models.loader import load_model
from baton.engine.parallel.collectives import Collectives, RankLost, num_bytes_for
from baton.engine.parallel.shard import Shard


def collectives_of(degree: int, whole_experts: bool = False) -> list[Collectives]:
    """Return the ends of so many ranks."""
    memory = memoryview(mmap.mmap(-1, num_bytes_for(degree)))
    return [Collectives(memory, Shard(rank, degree, whole_experts)) for rank in range(degree)]


@contextmanager
def ranked(config: EngineConfig, degree: int, whole: KVPool) -> Iterator[tuple[Model, KVPool]]:
    """The model of the first rank and its view of the pool `whole`, which the other ranks write too, until the end."""
    ends = collectives_of(degree, config.expert_parallel)
    models = [load_model(config, CPU, end) for end in ends]
    pools = [whole.part(end.shard.kv_heads(models[0].spec.num_kv_heads)) for end in ends]

    def run(rank: int) -> None:
        try:
            follow(models[rank], ends[rank], pools[rank])
        except RankLost:
            pass

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, degree)]
    for thread in threads:
        thread.start()
    try:
        yield models[0], pools[0]
    finally:
        ends[0].lose()
        for thread in threads:
            thread.join(10)
