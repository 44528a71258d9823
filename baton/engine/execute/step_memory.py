"""Measure the memory that steps take on a GPU, before the pool gets what is left of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.core.batch import FIRST_STATE, ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.execute.graphs import Outputs, StepGraphs, ladder
from baton.engine.execute.inputs import StepInputs, StepShape
from baton.engine.execute.launcher import Launcher, fitting_chunks, fitting_widths, largest_chunk
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.sampling.on_device import sampler_on
from baton.engine.sampling.sampler import PROMPT_ROWS, SampleRow, prompt_logprobs
from baton.sampling_params import SamplingParams


def step_bytes(model: Model, config: EngineConfig, speculates: bool) -> int:
    """Measure the memory of steps beside weights and pool, with a small pool of its own.

    That is the memory of the largest step, and what graphs keep for themselves.
    """
    assert config.max_model_len is not None, "the config is resolved"
    num_tokens, layout = largest_chunk(config), model.kv_layout(config.kv_dtype, config.block_size)
    has_states = layout.state is not None
    pool = KVPool(layout, layout.num_blocks(num_tokens), device=model.device, num_states=int(has_states))
    if pool.states is not None and speculates:
        pool.states.hold_drafts(model.num_draft_elements)
    most, table = config.max_num_batched_tokens, layout.num_blocks(config.max_model_len) + 1
    inputs = StepInputs(model.device, StepShape(most, most, config.max_num_seqs, table, has_states))
    taken = inputs.num_bytes + _largest_step_bytes(model, config, pool, inputs)
    if not config.cuda_graphs or not model.capturable:
        return taken
    return taken + _graph_bytes(model, config, pool, inputs, speculates)


def _largest_batch(config: EngineConfig, pool: KVPool) -> ForwardBatch:
    """Return a step with a chunk and all other sequences decoding, each as long as the pool allows."""
    num_tokens = largest_chunk(config)
    state = None if pool.states is None else FIRST_STATE
    rows, block_ids = torch.arange(num_tokens, device="cpu"), torch.arange(pool.num_blocks, device="cpu")
    chunk = num_tokens - (min(config.max_num_seqs, num_tokens) - 1)
    others = [SeqSlice(row, 1, num_tokens, block_ids, state) for row in range(chunk, num_tokens)]
    seqs = [SeqSlice(0, chunk, chunk, block_ids, state), *others]
    return ForwardBatch(torch.zeros_like(rows), rows, rows, seqs, rows[chunk - 1 :])


def _largest_step_bytes(model: Model, config: EngineConfig, pool: KVPool, inputs: StepInputs) -> int:
    """Measure the memory of the largest step, with drawing all its rows and the log-probabilities of a prompt."""
    batch, params = _largest_batch(config, pool), SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    sampled = [SampleRow(params, 0, row) for row in range(config.max_num_seqs)]

    def read_prompt(hidden: Tensor) -> None:
        rows = hidden[:PROMPT_ROWS]
        prompt_logprobs(rows, [0] * len(rows), 1, model.logits)

    def largest_step() -> None:
        logits = Launcher(model, pool).run(inputs.send(batch), False, None, read_prompt)[1]
        sampler_on(model.device).draw(logits, sampled[: len(logits)])

    return _peak_bytes(model.device, largest_step)


def _graph_bytes(model: Model, config: EngineConfig, pool: KVPool, inputs: StepInputs, speculates: bool) -> int:
    """Measure the memory that all graphs keep.

    All are captured, since graphs of few sequences may take more than the largest: they split KV and keep partial
    results.
    """

    max_model_len = config.max_model_len
    assert max_model_len is not None, "the config is resolved"

    def computed(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Compute and wait, as a capture does: the graph after the next uses the same buffer of inputs."""
        outputs = run()
        torch.cuda.synchronize(model.device)
        return torch.cuda.synchronize, outputs

    def every_graph() -> None:
        StepGraphs(
            model, pool, inputs, ladder(config.max_num_seqs), fitting_widths(config, speculates),
            fitting_chunks(model, config), max_model_len, computed,
        )  # fmt: skip

    return _peak_bytes(model.device, every_graph)


def _peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Return the peak memory of `run`, in bytes."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
