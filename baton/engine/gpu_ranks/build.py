"""Build an engine whose model is divided among several GPUs of this host."""

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import distributed

from baton.engine import native
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.device import Memory, memory_share, wait_for_memory
from baton.engine.core.model_spec import ModelSpec
from baton.engine.execute.build import (
    EngineParts,
    GpuMemoryFor,
    MakeProposers,
    explained,
    gpu_sizes,
    make_pool,
    use_launchers,
    widest,
)
from baton.engine.execute.launcher import GpuLauncher
from baton.engine.gpu_ranks.launcher import LeadingLauncher, LeadingPool
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import LeadingDeviceModel
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import RankLost, num_bytes_for
from baton.engine.parallel.distributed import DistributedCollectives, StageCollectives
from baton.engine.parallel.shard import Shard, unfit_for_ranks
from baton.engine.parallel.stage import PipelineStage, cut_layers
from baton.engine.ranks.process import Assignment, RankProcess, Ready
from baton.engine.ranks.spawn import OwnMemory, RankGrid, Ranks
from baton.engine.sampling.on_device import sampler_on
from baton.engine.speculation.proposers.selection import make_proposers

PROGRAM = "baton.engine.gpu_ranks"  # of a rank whose KV nobody fetches


class GpuRank(RankProcess):
    """Run a rank on a GPU of this host. `socket`: to its program, for messages about its KV."""

    def __init__(self, given: Assignment, program: str):
        self.shard = given.shard
        self.socket, theirs = socket.socketpair()
        with theirs:
            super().__init__(replace(given, stream_fd=theirs.fileno()), program)

    def end(self, deadline: float) -> None:
        super().end(deadline)
        self.socket.close()


def load_on_gpus(
    config: EngineConfig,
    gpu_memory_for: GpuMemoryFor | None = None,
    make: MakeProposers | None = None,
    rank_program: str | None = None,
) -> EngineParts:
    """Load the parts of Engine.load: those of the first rank here, and processes for the others. Raises ValueError, in
    one line, if the GPUs do not fit or a rank fails, and the errors of reading the model."""
    spec, make = read_spec(config.model), make or make_proposers
    shard = Shard(0, config.tensor_parallel, config.expert_parallel)
    if why := unfit(config, spec) or (unfit_for_ranks(spec, shard) if config.tensor_parallel > 1 else ""):
        raise ValueError(f"{_option(config)}: {why}")
    devices = devices_for(config)
    stages = cut_layers(spec, config.pipeline_parallel) if config.pipeline_parallel > 1 else [None] * len(devices)
    ranks, collectives = _start(config, devices, stages, rank_program or PROGRAM)
    try:
        with explained(devices[0], config):
            return _lead(config, spec, devices[0], gpu_memory_for, make, ranks, collectives, stages[0])
    except RankLost as error:
        why = ranks.why_lost() or str(error)
        ranks.close()
        raise ValueError(why) from None
    except BaseException:
        ranks.close()
        raise


def unfit(config: EngineConfig, spec: ModelSpec) -> str:
    """Return why ranks on GPUs cannot do what `config` asks for; "" if they can."""
    if spec.state is not None:
        return "layers with a state are computed by one GPU: leave it at 1, or give device cpu"
    if config.remote_stages:
        return "stages of other hosts compute on CPUs; leave remote_stages out, or give device cpu"
    if config.pipeline_parallel > 1 and config.tensor_parallel > 1:
        return "a stage on a GPU has one rank; leave pipeline_parallel or tensor_parallel at 1"
    if config.pipeline_parallel > 1 and (
        any(spec.windows) or spec.sinks or spec.chunked or len(spec.kv_layers) < spec.num_layers
    ):
        return "stages on GPUs have models whose layers all see all positions; give tensor_parallel"
    if config.sm_share is not None:
        return "sm_share: ranks have their GPUs alone; leave it out"
    if native.library() is None:  # ranks tell each other what to compute through it
        return f"ranks need the native kernels: {native.unavailable()}"
    if config.all_reduce == "fast" and config.batch_invariant:
        return "all_reduce fast adds in an order that the size of a step changes: give --no-batch-invariant as well"
    return ""


def devices_for(config: EngineConfig) -> list[torch.device]:
    """Return a GPU for each rank, the first ones that this process sees. Raises ValueError if there are too few, if
    they differ, or if torch cannot join them."""
    degree, option = config.num_ranks, _option(config)
    if (count := torch.cuda.device_count()) < degree:
        reason = f"each rank needs a GPU, and {count} can be seen"
        raise ValueError(f"{option}: {reason}; show more (CUDA_VISIBLE_DEVICES), or lower the number")
    if not distributed.is_nccl_available():
        raise ValueError(f"{option}: torch {torch.__version__} has no NCCL; install one that has it")
    names = [torch.cuda.get_device_name(index) for index in range(degree)]
    for index, name in enumerate(names):
        if name != names[0]:
            raise ValueError(f"{option}: GPU 0 is {names[0]}, GPU {index} is {name}: give ranks GPUs of a kind")
    return [torch.device("cuda", index) for index in range(degree)]


def _option(config: EngineConfig) -> str:
    if config.pipeline_parallel > 1:
        return f"pipeline_parallel {config.pipeline_parallel}"
    return f"tensor_parallel {config.tensor_parallel}"


def joined_by(given: Assignment, memory: memoryview, device: torch.device) -> DistributedCollectives:
    """Return this rank's end of what joins all ranks: those that share layers, or stages."""
    store = distributed.FileStore(given.store, given.shard.degree)
    kind = DistributedCollectives if given.stage is None else StageCollectives
    return kind(memory, given.shard, store, device, given.config.all_reduce == "fast")


def load_part(
    config: EngineConfig, device: torch.device, collectives: DistributedCollectives, stage: PipelineStage | None
) -> Model:
    """Read this rank's part of the model."""
    if isinstance(collectives, StageCollectives):
        return load_model(config, device, stage=stage, stages=collectives)
    return load_model(config, device, collectives)


def use(device: torch.device, config: EngineConfig) -> None:
    """Select a device for this process."""
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # none of its sockets listens beyond this host
        torch.cuda.set_device(device)
        wait_for_memory(partial(Memory.of, device), memory_share(config))


def device_parts(
    config: EngineConfig,
    model: Model,
    collectives: DistributedCollectives,
    speculates: bool,
    launcher_of: type[GpuLauncher] = GpuLauncher,
    pool_of: type[KVPool] = KVPool,
    memory_for: Callable[[int], Any] | None = None,
) -> tuple[EngineConfig, KVPool, GpuLauncher]:
    """Return the config with sizes, this rank's pool, and its launcher, warmed up. All ranks call it together and
    compute the same steps in it; only the first rank's `speculates` matters."""
    if not isinstance(collectives, StageCollectives):
        collectives.reach(config.max_num_batched_tokens * model.spec.hidden_size)
    spec, speculates = model.spec, not collectives.least(int(not (speculates and collectives.shard.rank == 0)))
    with torch.inference_mode():
        if config.num_blocks is None:
            own, _ = gpu_sizes(widest(config, spec), model, speculates)
            assert own is not None, "ranks have no layers with a state"
            config = replace(config, num_blocks=collectives.least(own))
        config = resolve(config, spec)
        pool = make_pool(config, model, memory_for, pool_of)
        launcher = launcher_of(model, pool, config, speculates, collectives.least)
        launcher.warm_up(config)
    return config, pool, launcher


def _start(
    config: EngineConfig, devices: Sequence[torch.device], stages: Sequence[PipelineStage | None], program: str
) -> tuple[Ranks, DistributedCollectives]:
    folder = tempfile.mkdtemp(prefix="baton-ranks-")  # only this user can read it
    atexit.register(shutil.rmtree, folder, True)  # not before exit: NCCL reads it again
    degree = len(devices)
    memory = OwnMemory(num_bytes_for(degree))
    given = [
        Assignment(
            config, memory_fd=memory.fd, memory_bytes=len(memory.memory), store=os.path.join(folder, "store"),
            shard=Shard(rank, degree, config.expert_parallel), stage=stage, device=str(device),
        )
        for rank, (device, stage) in enumerate(zip(devices, stages, strict=True))
    ]  # fmt: skip
    collectives = joined_by(given[0], memory.memory, devices[0])
    others = [GpuRank(each, program) for each in given[1:]]
    return Ranks(RankGrid([collectives], None, degree), others), collectives


def _lead(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    memory_for: GpuMemoryFor | None,
    make: MakeProposers,
    ranks: Ranks,
    collectives: DistributedCollectives,
    stage: PipelineStage | None,
) -> EngineParts:
    use(device, config)
    model = load_part(widest(config, spec), device, collectives, stage)
    assert isinstance(model, LeadingDeviceModel)
    ranks.wait(Ready.of(model))
    collectives.join()
    proposers = make(widest(config, spec), model)
    use_launchers(proposers)
    memory = memory_for and (lambda num_bytes: memory_for(num_bytes, device))
    with model.in_step():  # no rank is told these steps: all compute them at this point of their start
        config, pool, launcher = device_parts(
            config, model, collectives, bool(proposers), LeadingLauncher, LeadingPool, memory
        )
    assert isinstance(pool, LeadingPool)
    pool.lead(model)
    if stage is None:
        with torch.inference_mode():
            ranks.sums = model.measure_sums(config.max_num_batched_tokens)
    else:
        model.weights = model.weights.beside(ranks.reports[1:])
    return EngineParts(config, model, pool, sampler_on(device), proposers, launcher, ranks)
