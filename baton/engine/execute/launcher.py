"""Launch steps on a CPU or a GPU. On a GPU the inputs are sent first, and a step runs as a CUDA graph if there is
one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine import kernels, native
from baton.engine.core.batch import ForwardBatch, known_ids
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import MultiprocessorShare
from baton.engine.execute.activation_memory import activations_on
from baton.engine.execute.graphs import (
    AgreedCapture,
    Capture,
    CudaCapture,
    StepGraphs,
    chunk_sizes,
    ladder,
    widths,
)
from baton.engine.execute.inputs import StepInputs, StepShape
from baton.engine.execute.warm_up import warm_steps
from baton.engine.execute.watermark import LayerEvents
from baton.engine.kernels.compiling import CompileWatch
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import FirstStage, StagedStep
from baton.engine.sampling.on_device import sampler_on
from baton.engine.sampling.sampler import SampleRow
from baton.lines import one_line
from baton.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Draw = Callable[[Tensor], Tensor]  # logits fp32 [R, vocab_size] -> token ids int64 [R], both on the device


class LaunchedTokens:
    """The tokens that a launch draws on the device."""

    def __init__(self, drawn: Tensor):
        self.drawn = drawn  # int64 [R], on the device

    def read(self) -> list[int]:
        """Wait for the launch and return its tokens."""
        return self.drawn.tolist()


class Launcher:
    """Launches steps of a model on a CPU."""

    compiling: CompileWatch | None = None  # watches kernels that are compiled when they are first used
    overlaps = False  # whether a step is launched while another computes; on a CPU both would share the cores
    depth = 2  # the most steps in flight, if they overlap
    num_stages = 1  # pipeline stages, which compute steps of different sequences at the same time
    draws = True  # whether a launch draws its tokens, so that the next one continues before they are read
    allows_multi_step = True  # several steps may be computed in one native call: not in stages, nor on a GPU
    num_graphs = 0

    def __init__(self, model: Model, pool: KVPool):
        self.model, self.pool = model, pool
        self.activations = activations_on(pool.device)

    @property
    def summary(self) -> str:
        """The device's words in the engine's start line."""
        library = native.library()
        return "on the CPU" if library is None else f"on the CPU ({library.tier.name})"

    def run(
        self, batch: ForwardBatch, keeps_hidden: bool, on_layer: Callable[[int], None] | None,
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """Run `batch`, which is on the host, and return hidden rows and logits on the model's device.

        Hidden rows [R, hidden_size] are those the logits come from, None unless `keeps_hidden`; logits are fp32 [R,
        vocab_size]. `on_hidden` gets the rows of all tokens, as Model.hidden returns them.
        """
        self.activations.begin(len(batch.token_ids), len(batch.logit_rows))
        return self._logits_of(self.model.hidden(batch, self.pool, on_layer), batch, keeps_hidden, on_hidden)

    def _logits_of(
        self, hidden: Tensor, batch: ForwardBatch, keeps_hidden: bool, on_hidden: Callable[[Tensor], None] | None
    ) -> tuple[Tensor | None, Tensor]:
        self.activations.look()
        if on_hidden is not None:
            on_hidden(hidden)
        hidden = hidden[batch.logit_rows]
        if len(hidden):
            logits = self.model.logits(hidden)
        else:  # a kernel would read one row even of an empty tensor
            logits = hidden.new_empty(0, self.model.spec.vocab_size, dtype=torch.float32)
        self.activations.look()
        return (hidden if keeps_hidden else None), logits

    def launch(
        self, batch: ForwardBatch, draw: Draw, previous: LaunchedTokens | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> LaunchedTokens:  # fmt: skip
        """Launch a step whose tokens are drawn on the device, without waiting for it.

        At most one earlier launch has not been read: `previous`, if `batch` continues from its tokens. `on_layer` is
        as in `run`; on a GPU it is called when the tokens are read.
        """
        if previous is not None:
            batch = replace(batch, token_ids=known_ids(batch.token_ids, previous.drawn))
        return LaunchedTokens(draw(self.run(batch, False, on_layer)[1]))

    def stream_context(self) -> AbstractContextManager:
        """Return a context in whose stream all of a step runs, including sampling and copies."""
        return nullcontext()

    def without_graphs(self) -> AbstractContextManager:
        """Return a context in which every step is computed eagerly, to check graphs against."""
        return nullcontext()

    def wait(self) -> None:
        """Wait until all launches have passed."""


class StagedLauncher(Launcher):
    """Launches steps of a pipeline: while later stages compute a step, the first one computes the next, of other
    sequences.

    The tokens of a step are drawn in this process when the step has left the last stage.
    """

    model: FirstStage
    overlaps, draws, allows_multi_step = True, False, False

    def __init__(self, model: FirstStage, pool: KVPool):
        super().__init__(model, pool)
        self.depth = self.num_stages = model.pipeline.degree

    def begin(self, batch: ForwardBatch) -> StagedStep:
        """Compute a step in the first stage. Fewer than `depth` other steps may be begun and not finished."""
        self.activations.begin(len(batch.token_ids), len(batch.logit_rows))
        return self.model.begin(batch, self.pool)

    def finish(
        self, step: StagedStep, on_layer: Callable[[int], None] | None,
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """Finish the first step that was begun, and return what `run` returns."""
        return self._logits_of(self.model.finish(step, on_layer), step.batch, False, on_hidden)

    def wait(self) -> None:
        self.model.pipeline.drain()


class LandingTokens(LaunchedTokens):
    """Tokens that are being copied to pinned memory of the host."""

    def __init__(self, drawn: Tensor, landing: Tensor, report: Callable[[], None] | None = None):
        """Copy `drawn` to `landing`, int64 on the host and at least as long.

        `report()` is called when the tokens are read, before waiting for them: it waits for layers.
        """
        super().__init__(drawn)
        self._report = report
        self._landing = landing[: len(drawn)]
        self._landing.copy_(drawn, non_blocking=True)
        self._landed = torch.cuda.Event()
        self._landed.record()

    def read(self) -> list[int]:
        if self._report is not None:
            self._report()
        self._landed.synchronize()
        return self._landing.tolist()


class GpuLauncher(Launcher):
    """Launches steps on a GPU, with up to two in flight if the later one needs only the earlier one's tokens.

    A block is sealed, announced or released only after the last write of all steps that may touch it.
    """

    allows_multi_step = False

    def __init__(
        self, model: Model, pool: KVPool, config: EngineConfig, speculates: bool,
        least: Callable[[int], int] | None = None,
    ):  # fmt: skip
        """Capture the graphs. `config` is resolved; `least` is as in AgreedCapture, for ranks."""
        super().__init__(model, pool)
        self.compiling = CompileWatch()
        if not kernels.unavailable("cuda"):
            self.compiling.install()
        # Other models plan a step in host memory that the previous step may still read.
        self.overlaps = model.capturable
        num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        table = pool.layout.num_blocks(config.max_model_len)
        self._sm_share = None if config.sm_share is None else MultiprocessorShare(pool.device, config.sm_share)
        has_states = pool.states is not None
        self._inputs = StepInputs(pool.device, StepShape(num_tokens, num_tokens, num_seqs, table + 1, has_states))
        if has_states and speculates:
            pool.states.hold_drafts(model.num_draft_elements)
        pinned = pool.device.type == "cuda"
        self._landings = torch.zeros(2, num_tokens, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._turn = 0
        self._graphs: StepGraphs | None = None
        if config.cuda_graphs and model.capturable:
            fitting = fitting_widths(config, speculates)
            capture: Capture = CudaCapture(self._stream)
            capture = capture if least is None else AgreedCapture(capture, least)
            sizes = ladder(num_seqs)
            with self.stream_context():
                try:
                    self._graphs = StepGraphs(
                        model, pool, self._inputs, sizes, fitting, fitting_chunks(model, config), config.max_model_len,
                        capture,
                    )  # fmt: skip
                except torch.cuda.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # kernels that cannot be captured still run
                    logger.warning("steps run without CUDA graphs: %s", one_line(error))

    @property
    def summary(self) -> str:
        share = "" if self._sm_share is None else f", {self._sm_share.summary}"
        return f"on {torch.cuda.get_device_name(self.pool.device)}{share}, {self.num_graphs} graphs"

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def warm_up(self, config: EngineConfig) -> None:
        """Compile the kernels of steps without a graph. Called before serving, since it writes to the pool's first
        blocks."""
        num_blocks = min(self.pool.num_blocks, self.pool.layout.num_blocks(config.max_model_len))
        tokens, has_states = config.max_num_batched_tokens, self.pool.states is not None
        sizes = tokens, config.max_num_seqs, num_blocks, self.pool.block_size, has_states
        sampler, row = sampler_on(self.pool.device), SampleRow(SamplingParams(), 0, 0)
        with self.stream_context():
            for batch in warm_steps(*sizes):  # not bound to a name: two steps' logits would be held at a time
                sampler.draw(super().run(self._inputs.send(batch), False, None)[1][:1], [row])
                self.wait()  # also for the copy of its inputs, whose buffer is used again

    def run(
        self, batch: ForwardBatch, keeps_hidden: bool, on_layer: Callable[[int], None] | None,
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """Run `batch` as Launcher.run does.

        `on_layer` is called after the launch, as each layer passes; not if a graph runs, whose layers count as written
        at its end. With `on_hidden` no graph runs, since it keeps fewer rows.
        """
        if on_hidden is None and self._graphs is not None and (shape := self._graphs.shape_for(batch)) is not None:
            hidden, logits = self._graphs.run(batch, shape)
            return (hidden.clone() if keeps_hidden else None), logits
        if on_layer is None:
            return super().run(self._inputs.send(batch), keeps_hidden, None, on_hidden)
        events = LayerEvents()
        found = super().run(self._inputs.send(batch), keeps_hidden, events.record, on_hidden)
        events.report(on_layer)
        return found

    def launch(
        self, batch: ForwardBatch, draw: Draw, previous: LaunchedTokens | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> LaunchedTokens:  # fmt: skip
        known, events = None if previous is None else previous.drawn, None
        if self._graphs is not None and (shape := self._graphs.shape_for(batch)) is not None:
            logits = self._graphs.run(batch, shape, known)[1]
        else:
            events = None if on_layer is None else LayerEvents()
            logits = super().run(self._inputs.send(batch, known), False, events and events.record)[1]
        self._turn ^= 1
        report = None if events is None else lambda: events.report(on_layer)
        return LandingTokens(draw(logits), self._landings[self._turn], report)

    def replay(self, num_seqs: int) -> None:
        """Replay the graph of a decode step of `num_seqs` sequences on its last inputs, and wait; for measuring."""
        with self.stream_context():
            self._graphs.replay(num_seqs)
        self.wait()

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        return None if self._sm_share is None else self._sm_share.stream

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    def stream_context(self) -> AbstractContextManager:
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        (self._stream or torch.cuda.current_stream(self.pool.device)).synchronize()


def fitting_widths(config: EngineConfig, speculates: bool) -> list[int]:
    """Return the numbers of tokens of a sequence in the decode steps that have graphs."""
    most = config.max_num_batched_tokens // config.max_num_seqs
    return [width for width in widths(speculates, config.num_draft_tokens) if width <= most]


def fitting_chunks(model: Model, config: EngineConfig) -> list[int]:
    """Return the tokens of chunks that have graphs. Only Triton's layers skip a chunk's padding when they write KV."""
    if model.layers_name != "triton":
        return []
    return chunk_sizes(largest_chunk(config))


def largest_chunk(config: EngineConfig) -> int:
    """Return the most tokens that one sequence has in a step."""
    return min(config.max_num_batched_tokens, config.max_model_len)
