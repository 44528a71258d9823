"""One rank of a model, started by the first one (ranks/spawn.py): reads its part, then computes what it is told."""

import json
import mmap
import os
import sys
import threading
import time

import torch

from baton.engine.core.model_errors import ModelError
from baton.engine.core.reproducible import fix_order_of_sums
from baton.engine.kv.pool import CPU, KVPool
from baton.engine.models.leading import follow
from baton.engine.models.loader import load_model
from baton.engine.parallel.collectives import Collectives, RankLost, num_bytes_for
from baton.engine.ranks.spawn import BEAT_S, Assignment
from kvtransfer.layout import KVLayout


def main() -> None:
    """Serve until the first rank closes stdin or ends, or a rank is lost."""
    given = Assignment.parse(sys.stdin.readline())
    threading.Thread(target=_leave_with_leader, daemon=True).start()
    config, shard = given.config, given.shard
    assert config.threads is not None and config.num_blocks is not None
    collectives = Collectives(_map(given.collectives_fd, num_bytes_for(shard.degree)), shard)
    threading.Thread(target=_beat, args=(collectives,), daemon=True).start()
    torch.set_num_threads(config.threads)
    if config.batch_invariant:
        fix_order_of_sums()
    try:
        model = load_model(config, CPU, collectives)
    except (ModelError, ValueError) as error:
        _say(error=str(error))
        sys.exit(1)
    layout = KVLayout((model.kv_group(config.kv_dtype, config.block_size),))
    pool = KVPool(layout, config.num_blocks, _map(given.pool_fd, given.pool_bytes))
    _say(num_bytes=model.weights.num_bytes)
    try:
        with torch.inference_mode():
            follow(model, collectives, pool.part(shard.kv_heads(model.spec.num_kv_heads)))
    except RankLost:
        pass


def _map(fd: int, num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, num_bytes))


def _say(**fields) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _beat(collectives: Collectives) -> None:
    while True:
        collectives.beat()
        time.sleep(BEAT_S / 2)


def _leave_with_leader() -> None:
    while os.read(
        0, 1024
    ):  # until it is closed, by hand or by the end of the first rank; not by sys.stdin, which main has locked
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
