"""One rank of a model on a GPU, started by the first one (ranks/process.py): reads its part, then launches what it is told."""

import sys
import threading
from contextlib import suppress

import torch
from torch import distributed

from baton.engine.gpu_ranks.build import device_parts, use, widest
from baton.engine.gpu_ranks.launcher import follow_launches
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.distributed import DistributedCollectives
from baton.engine.ranks.process import Assignment
from baton.engine.ranks.program import leave_with_leader, map_memory, ready, say_often


def main() -> None:
    """Serve until the first rank closes stdin or ends, or a rank is lost."""
    given = Assignment.parse(sys.stdin.readline())
    threading.Thread(target=leave_with_leader, daemon=True).start()
    if given.config.threads is not None:
        torch.set_num_threads(given.config.threads)
    with suppress(RankLost):
        _serve(given)


def _serve(given: Assignment) -> None:
    config, shard, device = given.config, given.shard, torch.device(given.device)
    memory, store = map_memory(given.memory_fd, given.memory_bytes), distributed.FileStore(given.store, shard.degree)
    collectives = DistributedCollectives(memory, shard, store, device, config.all_reduce == "fast")
    say_often(collectives.beat)
    use(device, config)
    loaded = widest(config, read_spec(config.model))
    model = ready(lambda: load_model(loaded, device, collectives))
    collectives.join()
    _, _, launcher = device_parts(config, model, collectives, False)
    with torch.inference_mode(), launcher.place():
        follow_launches(launcher, collectives)


if __name__ == "__main__":
    main()
