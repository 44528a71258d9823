"""Load an engine's parts, of one process or of several ranks, on CPUs or GPUs."""

from baton.engine import kernels
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import find_device
from baton.engine.execute.build import EngineParts, GpuMemoryFor, MakeProposers, MemoryFor, load_parts
from baton.engine.gpu_ranks.build import load_on_gpus
from baton.engine.ranks.spawn import Joining


def load(
    config: EngineConfig, identity: bytes, memory_for: MemoryFor | None, gpu_memory_for: GpuMemoryFor | None,
    make: MakeProposers | None, joining: Joining | None, rank_program: str | None,
) -> EngineParts:  # fmt: skip
    """Load the parts of an engine on the configured device, with the arguments of load_parts.

    `rank_program` is the module that other ranks on GPUs run, instead of gpu_ranks/build.py.
    """
    if find_device(config.device).type == "cuda":
        kernels.prepare()
        if config.num_ranks > 1:
            return load_on_gpus(config, gpu_memory_for, make, rank_program)
    return load_parts(config, identity, memory_for, gpu_memory_for, make, joining)
