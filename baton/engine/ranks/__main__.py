"""One rank of a model, started by the first one (ranks/process.py): it reads its part, then computes what it is
told."""

import socket
import sys
import threading
from contextlib import suppress

import torch

from baton.engine.core.config import EngineConfig
from baton.engine.core.reproducible import fix_order_of_sums
from baton.engine.kv.block_pages import num_block_ids
from baton.engine.kv.pool import CPU, DTYPES, KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import follow, follow_stage
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import Collectives, RankLost
from baton.engine.parallel.pipeline import PipelineFollower, rows_over
from baton.engine.parallel.stream import SocketStream
from baton.engine.ranks.process import Assignment
from baton.engine.ranks.program import leave_with_leader, map_memory, ready, say_often


def main() -> None:
    """Serve until the first rank closes stdin or ends, or a rank is lost."""
    given = Assignment.parse(sys.stdin.readline())
    threading.Thread(target=leave_with_leader, daemon=True).start()
    assert given.config.threads is not None
    torch.set_num_threads(given.config.threads)
    if given.config.batch_invariant:
        fix_order_of_sums()
    with suppress(RankLost):
        _serve(given)


def _serve(given: Assignment) -> None:
    config, collectives, follower = given.config, None, None
    if given.memory_fd >= 0:
        memory = map_memory(given.memory_fd, given.memory_bytes)
        collectives = Collectives(memory, given.shard, config.all_reduce == "fast")
    if given.stream_fd >= 0:
        rows = rows_over(
            map_memory(given.rows_fd, given.rows_bytes), read_spec(config.model).hidden_size, DTYPES[config.dtype]
        )
        follower = PipelineFollower(SocketStream(socket.socket(fileno=given.stream_fd)), rows)
    end = follower if collectives is None else collectives
    assert end is not None
    say_often(end.beat)
    model = ready(lambda: load_model(config, CPU, collectives, given.stage))
    pool = _pool(given, model)
    if collectives is not None:
        pool = pool.part(given.shard.kv_heads(model.spec.num_kv_heads))
    with torch.inference_mode():
        if follower is not None:
            follow_stage(model, follower, pool)
        elif collectives is not None:
            follow(model, collectives, pool)


def _pool(given: Assignment, model: Model) -> KVPool:
    config: EngineConfig = given.config
    layout = model.kv_layout(config.kv_dtype, config.block_size)
    assert config.num_blocks is not None
    memory = map_memory(given.pool_fd, given.pool_bytes)
    num_blocks = num_block_ids(config.num_blocks, layout, model.spec.windows, not config.remote_stages)
    return KVPool(layout, num_blocks, memory, num_states=config.num_states or 0)


if __name__ == "__main__":
    main()
