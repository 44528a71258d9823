"""The ranks or stages of one model as threads of this process, over memory that they share as processes do; and how
those that are processes are lost."""

import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import distributed

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Request
from baton.engine.engine import Engine
from baton.engine.kv.pool import CPU, DTYPES, KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import follow, follow_stage
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import Collectives, RankLost, num_bytes_for
from baton.engine.parallel.distributed import DistributedCollectives, add_tree
from baton.engine.parallel.pipeline import PipelineFollower, PipelineLeader
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.stage import PipelineStage, cut_layers
from baton.engine.parallel.stream import SocketStream


def collectives_of(degree: int, whole_experts: bool = False, fast: bool = False) -> list[Collectives]:
    """Return the ends of so many ranks."""
    memory = memoryview(mmap.mmap(-1, num_bytes_for(degree)))
    return [Collectives(memory, Shard(rank, degree, whole_experts), fast) for rank in range(degree)]


@contextmanager
def distributed_of(degree: int, fast: bool = False) -> Iterator[list[DistributedCollectives]]:
    """Yield the ends of so many ranks, joined by gloo, until the end."""
    memory, store = memoryview(mmap.mmap(-1, num_bytes_for(degree))), distributed.HashStore()
    ends = [DistributedCollectives(memory, Shard(rank, degree), store, CPU, fast) for rank in range(degree)]
    for end in ends:
        end._add = add_tree  # threads: Triton's interpreter runs one kernel at a time
    together(ends, lambda end: end.join())
    try:
        yield ends
    finally:
        for end in ends:
            end.lose()


def together(ends: Sequence[Collectives], act: Callable) -> list:
    """Let all ranks act, each in a thread of its own; return what each of them had. None waits for one that failed."""

    def acting(end: Collectives):
        try:
            return act(end)
        except BaseException:
            end.lose()
            raise

    with ThreadPoolExecutor(len(ends)) as threads:
        return list(threads.map(acting, ends))


def depths_of(engine: Engine) -> list[int]:
    """Return the steps that are in flight as each other one is launched, from here on."""
    depths, launch = [0], engine.runner.launch

    def noted(slices, *given):
        depths.append(len(engine._flights))
        return launch(slices, *given)

    engine.runner.launch = noted
    return depths


def lose_last_rank(
    engine: Engine, how: signal.Signals, said: str, long: Request, short: Callable[[str], Request]
) -> None:
    """Signal it while `long` is answered: every step from then on ends, and the reason is told. `short`: more to do, by
    name."""
    reasons: list[str] = []
    try:
        engine.ranks.when_lost(reasons.append)
        engine.submit(long)
        engine.step()
        time.sleep(0.3)  # it has been seen to live
        os.kill(pid := engine.ranks.pids[-1], how)
        with pytest.raises(RankLost):
            while True:
                engine.step()
                assert engine.has_work() or not engine.submit(short(str(engine.step_number)))
        engine.ranks._watcher.join(10)
        assert reasons == [f"rank {len(engine.ranks.pids)} (pid {pid}) {said}"]
    finally:
        engine.ranks.close()


@contextmanager
def ranked(config: EngineConfig, degree: int, whole: KVPool) -> Iterator[tuple[Model, KVPool]]:
    """Yield the model of the first rank and its view of the pool `whole`, which the other ranks write too, until the
    end."""
    ends = collectives_of(degree, config.expert_parallel, config.all_reduce == "fast")
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


@contextmanager
def staged(config: EngineConfig, num_stages: int, whole: KVPool) -> Iterator[Model]:
    """Yield the model of the first of so many stages, which write the pool `whole` together, until the end."""
    spec, dtype = read_spec(config.model), DTYPES[config.dtype]
    first, *others = cut_layers(spec, num_stages)
    rows = torch.zeros(num_stages * config.max_num_batched_tokens, spec.hidden_size, dtype=dtype)
    pairs = [socket.socketpair() for _ in others]
    pipeline = PipelineLeader([SocketStream(own) for own, _ in pairs], rows)
    model = load_model(config, stage=first, pipeline=pipeline)

    def run(stage: PipelineStage, theirs: socket.socket) -> None:
        own = whole.part(whole.heads)  # a pool remembers the slots of the step that it wrote last
        with suppress(RankLost), torch.inference_mode():
            follow_stage(load_model(config, stage=stage), PipelineFollower(SocketStream(theirs), rows), own)

    threads = [
        threading.Thread(target=run, args=(stage, theirs)) for stage, (_, theirs) in zip(others, pairs, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield model
    finally:
        pipeline.lose()
        for thread in threads:
            thread.join(10)
        for pair in pairs:
            for end in pair:
                end.close()
