"""One rank of a model, started by the first one (ranks/process.py): reads its part, then computes what it is told."""

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from baton import failpoints
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.core.reproducible import fix_order_of_sums
from baton.engine.kv.pool import CPU, DTYPES, KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import follow, follow_stage
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import Collectives, RankLost
from baton.engine.parallel.pipeline import PipelineFollower, rows_over
from baton.engine.parallel.stream import SocketStream
from baton.engine.ranks.process import Assignment, Ready
from baton.engine.ranks.spawn import BEAT_S


def main() -> None:
    """Serve until the first rank closes stdin or ends, or a rank is lost."""
    given = Assignment.parse(sys.stdin.readline())
    threading.Thread(target=_leave_with_leader, daemon=True).start()
    assert given.config.threads is not None
    torch.set_num_threads(given.config.threads)
    if given.config.batch_invariant:
        fix_order_of_sums()
    with suppress(RankLost):
        _serve(given)


def _serve(given: Assignment) -> None:
    config, collectives, follower = given.config, None, None
    if given.memory_fd >= 0:
        memory = _map(given.memory_fd, given.memory_bytes)
        collectives = Collectives(memory, given.shard, config.all_reduce == "fast")
    if given.stream_fd >= 0:
        rows = rows_over(
            _map(given.rows_fd, given.rows_bytes), read_spec(config.model).hidden_size, DTYPES[config.dtype]
        )
        follower = PipelineFollower(SocketStream(socket.socket(fileno=given.stream_fd)), rows)
    end = follower if collectives is None else collectives
    assert end is not None
    _beat(end.beat)
    model = _ready(lambda: load_model(config, CPU, collectives, given.stage))
    pool = _pool(given, model)
    if collectives is not None:
        pool = pool.part(given.shard.kv_heads(model.spec.num_kv_heads))
    with torch.inference_mode():
        if follower is not None:
            follow_stage(model, follower, pool)
        elif collectives is not None:
            follow(model, collectives, pool)


def _ready(load: Callable[[], Model]) -> Model:
    failpoints.hit("rank.load")
    try:
        model = load()
    except (ModelError, ValueError) as error:
        _say(json.dumps({"error": str(error)}))
        sys.exit(1)
    failpoints.hit("rank.ready")
    _say(Ready.of(model).line())
    return model


def _pool(given: Assignment, model: Model) -> KVPool:
    config: EngineConfig = given.config
    layout = model.kv_layout(config.kv_dtype, config.block_size)
    assert config.num_blocks is not None
    memory = _map(given.pool_fd, given.pool_bytes)
    return KVPool(layout, config.num_blocks, memory, num_states=config.num_states or 0)


def _map(fd: int, num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, num_bytes))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _beat(beat: Callable[[], None]) -> None:
    """Say often that this process runs."""

    def repeat() -> None:
        while True:
            try:
                beat()
            except RankLost:
                return
            time.sleep(BEAT_S / 2)

    threading.Thread(target=repeat, daemon=True).start()


def _leave_with_leader() -> None:
    while os.read(
        0, 1024
    ):  # until it is closed, by hand or by the end of the first rank; not by sys.stdin, which main has locked
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
