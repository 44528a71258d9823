"""Build an engine's parts from a model folder, on its device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from baton.engine import native
from baton.engine.core import cpu
from baton.engine.core.config import MAX_NUMBER, EngineConfig, resolve
from baton.engine.core.device import (
    GIB,
    Memory,
    check_host_pool,
    find_device,
    memory_share,
    pool_blocks,
    pool_room,
    pool_states,
    set_threads,
    wait_for_memory,
)
from baton.engine.core.model_spec import ModelSpec
from baton.engine.core.reproducible import fix_order_of_sums
from baton.engine.execute.launcher import GpuLauncher, Launcher, StagedLauncher
from baton.engine.execute.step_memory import step_bytes
from baton.engine.kv.block_pages import BlockPages, num_block_ids, part_bytes
from baton.engine.kv.ledger import Ledger
from baton.engine.kv.pool import CPU, DTYPES, KVPool
from baton.engine.kv.states import StatePool
from baton.engine.kv.window import Window
from baton.engine.kv.window_parts import WindowParts
from baton.engine.models.decoder import Model
from baton.engine.models.leading import LeadingModel, SpreadPool
from baton.engine.models.linears import WeightReport
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.shard import Shard, unfit_for_ranks
from baton.engine.parallel.stage import cut_layers
from baton.engine.ranks.process import Ready
from baton.engine.ranks.spawn import Joining, OwnMemory, Ranks, SharedMemory, Started, start_ranks
from baton.engine.sampling.native_sampler import host_sampler
from baton.engine.sampling.on_device import sampler_on
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculation.proposers.proposer import Proposer
from baton.engine.speculation.proposers.selection import make_proposers
from baton.lines import one_line

MemoryFor = Callable[[int], SharedMemory]  # num_bytes -> host memory
GpuMemoryFor = Callable[[int, torch.device], Any]  # num_bytes, device -> an object with the CUDA array interface
StartRanks = Callable[..., Started]  # see start_ranks of ranks/spawn.py
MakeProposers = Callable[[EngineConfig, Model], Sequence[Proposer]]


class EngineParts(NamedTuple):
    """The arguments of Engine."""

    config: EngineConfig  # resolved
    model: Model
    pool: KVPool
    sampler: Sampler
    proposers: Sequence[Proposer]
    launcher: Launcher
    ranks: Ranks | None = None


def load_parts(
    config: EngineConfig, identity: bytes, memory_for: MemoryFor | None, gpu_memory_for: GpuMemoryFor | None,
    make: MakeProposers | None, joining: Joining | None,
) -> EngineParts:  # fmt: skip
    """Load the parts of an engine, and raise ValueError for settings without effect on its device.

    `make` makes the proposers instead of those that the config names. `joining` is where ranks of other hosts join;
    their model must have this `identity`. Raises what reading the model raises.
    """
    device = find_device(config.device)
    if device.type == "cpu" and config.gpu_memory_utilization is not None:
        raise ValueError("gpu_memory_utilization has no effect on a CPU; size the pool with num_blocks")
    if device.type == "cpu" and config.sm_share is not None:
        raise ValueError("sm_share has no effect on a CPU; give threads")
    spec, make = read_spec(config.model), make or make_proposers
    set_threads(config.threads)
    if device.type == "cpu":
        if config.batch_invariant:
            fix_order_of_sums()
        dtype = cpu.compute_dtype(spec.dtype, native.unavailable()) if config.dtype == "auto" else config.dtype
        config = resolve(replace(config, dtype=dtype), spec)
        if config.num_ranks > 1:
            return _of_ranks(
                config,
                spec,
                memory_for or OwnMemory,
                make,
                partial(start_ranks, identity=identity.hex(), joining=joining),
            )
        model = load_model(config, device)
        _check_pool(config, model, [model.weights])
        pool = make_pool(config, model, memory_for and (lambda num_bytes: memory_for(num_bytes).memory))
        return EngineParts(config, model, pool, host_sampler(), make(config, model), Launcher(model, pool))
    with explained(device, config):
        return _on_gpu(config, spec, device, gpu_memory_for, make)


@contextmanager
def explained(device: torch.device, config: EngineConfig) -> Iterator[None]:
    """Turn an out-of-memory error of the GPU into a ValueError of one line."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        memory = Memory.of(device)
        sizes = f"{memory.free / GIB:.1f} GiB are free of {memory.total / GIB:.1f}"
        raise ValueError(
            f"out of GPU memory at start: {sizes}; lower gpu_memory_utilization ({memory_share(config):g}), "
            f"max_num_batched_tokens or max_num_seqs, or quantize ({one_line(error, 160)})"
        ) from None


def _of_ranks(
    config: EngineConfig, spec: ModelSpec, memory_for: MemoryFor, make: MakeProposers, start: StartRanks
) -> EngineParts:
    """Load the parts of an engine of several ranks on CPUs; this process is the first rank.

    All ranks load at the same time, and write one pool, each its heads or its layers. So KV transfers are the same as
    for a worker of one process.
    """
    degree = config.tensor_parallel
    if why := unfit_for_ranks(spec, Shard(0, degree, config.expert_parallel)) if degree > 1 else "":
        raise ValueError(f"tensor_parallel {degree}: {why}")
    if config.remote_stages and spec.state is not None:
        raise ValueError("remote_stages: states stay on one host; leave it out for this model, whose layers keep some")
    stages = cut_layers(spec, config.pipeline_parallel)
    config = replace(config, threads=config.threads or max(1, torch.get_num_threads() // config.num_ranks_here))
    torch.set_num_threads(config.threads)
    layout = spec.kv_layout(config.kv_dtype, config.block_size)
    num_blocks = num_block_ids(config.num_blocks, layout, spec.windows, not config.remote_stages)
    num_states = config.num_states or 0
    memory = memory_for(layout.pool_bytes(num_blocks, num_states))
    ranks, collectives, pipeline = start(config, memory, stages, (spec.hidden_size, DTYPES[config.dtype]))
    try:
        pool = own = KVPool(layout, num_blocks, memory.memory, num_states=num_states)
        if collectives is not None:
            own = pool.part(collectives.shard.kv_heads(spec.num_kv_heads))
        elif config.remote_stages:
            pool = own = SpreadPool(layout, config.num_blocks, memory.memory, pipeline)
        model = load_model(config, CPU, collectives, stages[0] if pipeline is not None else None, pipeline)
        ranks.wait(Ready.of(model))
        if isinstance(model, LeadingModel):
            ranks.sums = model.measure_sums(config.max_num_batched_tokens)
        launcher = Launcher(model, own) if pipeline is None else StagedLauncher(model, own)
        if pipeline is not None:
            model.weights = model.weights.beside(ranks.reports[1:])
        _check_pool(config, model, ranks.reports)
        return EngineParts(config, model, pool, host_sampler(), make(config, model), launcher, ranks)
    except BaseException:
        ranks.close()
        raise


def _check_pool(config: EngineConfig, model: Model, weights: Sequence[WeightReport]) -> None:
    """Raise ValueError if this host has no memory for the pool beside the `weights` of all ranks.

    Does nothing with stages on other hosts, whose memory is unknown here.
    """
    if not config.remote_stages:
        layout = model.spec.kv_layout(config.kv_dtype, config.block_size)
        pool_bytes = layout.pool_bytes(config.num_blocks, config.num_states or 0)
        weight_bytes = sum(each.num_bytes for each in weights)
        check_host_pool(pool_bytes, weight_bytes, config.workers_per_host, len(weights))


def _on_gpu(
    config: EngineConfig, spec: ModelSpec, device: torch.device, memory_for: GpuMemoryFor | None, make: MakeProposers
) -> EngineParts:
    """Load the parts on a GPU; the pool gets the memory left by the weights and the largest step."""
    loaded = widest(config, spec)
    wait_for_memory(partial(Memory.of, device), memory_share(config))
    model = load_model(loaded, device)
    proposers = make(loaded, model)
    use_launchers(proposers)
    with torch.inference_mode():
        if config.num_blocks is None:
            sized = replace(loaded, num_states=config.num_states)
            num_blocks, num_states = gpu_sizes(sized, model, bool(proposers))
            config = replace(config, num_blocks=num_blocks, num_states=num_states)
        config = resolve(config, spec)
        pool = make_pool(config, model, memory_for and (lambda num_bytes: memory_for(num_bytes, device)))
        launcher = GpuLauncher(model, pool, config, bool(proposers))
        launcher.warm_up(config)
    return EngineParts(config, model, pool, sampler_on(device), proposers, launcher)


def widest(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the config to load with before the pool's size is known: with the longest context that could fit."""
    return resolve(config if config.num_blocks else replace(config, num_blocks=MAX_NUMBER), spec)


def use_launchers(proposers: Sequence[Proposer]) -> None:
    """Give draft models on a GPU a launcher as the model has."""
    for proposer in proposers:
        proposer.use_launcher(draft_launcher)


@torch.inference_mode()
def draft_launcher(model: Model, pool: KVPool, config: EngineConfig) -> GpuLauncher:
    """Return a warmed-up launcher of a draft model on a GPU. It has graphs for one token a sequence and for more."""
    launcher = GpuLauncher(model, pool, config, True)
    launcher.warm_up(config)
    return launcher


def gpu_sizes(config: EngineConfig, model: Model, speculates: bool) -> tuple[int | None, int | None]:
    """Return how many KV blocks and state blocks fit beside the weights, the adapters and the largest step.

    KV blocks are None if they have no bytes; state blocks are as configured, if the config says. Raises ValueError if
    too few fit.
    """
    used = step_bytes(model, config, speculates)
    layout = model.kv_layout(config.kv_dtype, config.block_size)
    least = layout.num_blocks(min(config.max_model_len, config.max_num_batched_tokens))
    adapters = adapter_bytes(config, model)
    memory, share, num_states = Memory.of(model.device), memory_share(config), config.num_states
    memory = replace(memory, free=memory.free - adapters, ours=memory.ours + adapters)
    if layout.state is not None:
        each = layout.state_bytes
        each += speculates * StatePool.draft_bytes(layout.state, model.num_draft_elements)
        room = pool_room(memory, share, used)
        num_states = num_states or pool_states(room, each, config.max_num_seqs, layout.block_bytes > 0)
        if num_states * each > room:
            sizes = f"{num_states} of {each / GIB:.3f} GiB, and {max(room, 0) / GIB:.2f} are left"
            raise ValueError(f"out of GPU memory for states: {sizes}; lower num_states or max_num_batched_tokens")
        used += num_states * each
        if not layout.block_bytes:
            return None, num_states
    return pool_blocks(memory, share, used, layout.block_bytes, least), num_states


def adapter_bytes(config: EngineConfig, model: Model) -> int:
    """Return the bytes of the configured adapters once they are ready.

    With adapter_slots these are the slots and one more, which is made ready before it has a slot, each as large as the
    largest adapter. Raises ModelError for an adapter that does not fit the model.
    """
    folders = config.adapter_folders.items()
    sizes = [model.make_adapter(name, model.read_adapter(folder)).num_bytes for name, folder in folders]
    return sum(sizes) if config.adapter_slots is None else (config.adapter_slots + 1) * max(sizes, default=0)


def make_pool(
    config: EngineConfig, model: Model, memory_for: Callable[[int], Any] | None, kind: type[KVPool] = KVPool
) -> KVPool:
    """Return a pool for a model, in memory of its own if `memory_for` is None."""
    layout, num_states = model.kv_layout(config.kv_dtype, config.block_size), config.num_states or 0
    gives_back_parts = model.device == CPU and model.attention.skips_outside
    num_blocks = num_block_ids(config.num_blocks, layout, model.spec.windows) if gives_back_parts else config.num_blocks
    memory = memory_for(layout.pool_bytes(num_blocks, num_states)) if memory_for is not None else None
    return kind(layout, num_blocks, memory, model.device, num_states)


def make_ledger(config: EngineConfig, model: Model, pool: KVPool) -> Ledger:
    """Return the ledger of a pool. It has parts if the pool has more block ids than the config has whole blocks."""
    spec, block_size, most, parts = model.spec, pool.layout.block_size, config.max_num_batched_tokens, None
    num_blocks, window = pool.num_blocks, Window(spec.kv_window, block_size, most)
    if spec.partial_window is not None and config.num_blocks is not None and config.num_blocks < num_blocks:
        num_blocks = config.num_blocks
        if model.attention.skips_outside:
            sizes = pool.layout.block_bytes, part_bytes(pool.layout, spec.windows)
            window = Window(spec.partial_window, block_size, most, *sizes)
            parts = WindowParts(num_blocks, pool.num_blocks, window, BlockPages(pool, spec.windows))
    return Ledger(num_blocks, block_size, len(pool.states or ()), window, parts=parts)
