"""How a step is computed: as it stands on a CPU; on a GPU sent there first, and as a graph where there is one."""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.batch import ForwardBatch, SeqSlice
from baton.engine.config import EngineConfig
from baton.engine.graphs import CudaCapture, DecodeGraphs, ladder, widths
from baton.engine.inputs import StepInputs, StepShape
from baton.engine.kv.pool import KVPool
from baton.engine.models.llama import Model
from kvtransfer.layout import KVLayout


class Launcher:
    """The model and its pool on a CPU."""

    num_graphs = 0
    words = "on the CPU"  # for the engine's start line

    def __init__(self, model: Model, pool: KVPool):
        self.model, self.pool = model, pool

    def run(
        self, batch: ForwardBatch, keeps_hidden: bool, on_layer: Callable[[int], None] | None
    ) -> tuple[Tensor | None, Tensor]:
        """`batch` on the host -> the hidden rows behind the logits, where they are kept, and logits fp32
        [R, vocab_size], on the model's device."""
        if not keeps_hidden:
            return None, self.model.forward(batch, self.pool, on_layer)
        hidden = self.model.hidden(batch, self.pool, on_layer)[batch.logit_rows]
        return hidden, self.model.logits(hidden)

    def wait(self) -> None:
        """Until all that was launched has passed."""


class GpuLauncher(Launcher):
    """One step in flight: the next is prepared when the results of this one have been read, so that every gate of the
    ledger (a block sealed, announced, given back) lies behind the step's last write."""

    def __init__(self, model: Model, pool: KVPool, config: EngineConfig, speculates: bool):
        """`config` is resolved. Captures the graphs."""
        super().__init__(model, pool)
        num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        table = pool.layout.num_blocks(config.max_model_len)
        self._inputs = StepInputs(pool.device, StepShape(num_tokens, num_tokens, num_seqs, table + 1))
        self._graphs: DecodeGraphs | None = None
        if config.cuda_graphs and model.attention.capturable:
            fitting = [width for width in widths(speculates, config.num_draft_tokens) if width * num_seqs <= num_tokens]
            self._graphs = DecodeGraphs(
                model, pool, self._inputs, ladder(num_seqs), fitting, config.max_model_len, CudaCapture()
            )

    @property
    def words(self) -> str:
        return f"on {torch.cuda.get_device_name(self.pool.device)}, {self.num_graphs} graphs"

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def run(
        self, batch: ForwardBatch, keeps_hidden: bool, on_layer: Callable[[int], None] | None
    ) -> tuple[Tensor | None, Tensor]:
        """`on_layer` is not called: that a layer was launched does not mean that its KV is written."""
        if self._graphs is not None and (shape := self._graphs.shape_for(batch)) is not None:
            hidden, logits = self._graphs.run(batch, shape)
            return (hidden.clone() if keeps_hidden else None), logits
        return super().run(self._inputs.send(batch), keeps_hidden, None)

    def replay(self, num_seqs: int) -> None:
        """The bare graph of a decode step of so many sequences, on whatever it read last; for measuring."""
        self._graphs.replay(num_seqs)
        self.wait()

    def wait(self) -> None:
        torch.cuda.current_stream(self.pool.device).synchronize()


def step_bytes(model: Model, config: EngineConfig) -> int:
    """What the largest step takes beside weights and pool: one is run, in a pool of its own."""
    device, block_size = model.device, config.block_size
    num_tokens = min(config.max_num_batched_tokens, config.max_model_len)
    layout = KVLayout((model.kv_group(config.kv_dtype, block_size),))
    pool = KVPool(layout, layout.num_blocks(num_tokens), device=device)
    rows, block_ids = torch.arange(num_tokens, device="cpu"), torch.arange(pool.num_blocks, device="cpu")
    batch = ForwardBatch(
        torch.zeros_like(rows), rows, rows, [SeqSlice(0, num_tokens, num_tokens, block_ids)],
        rows[: config.max_num_seqs],
    )  # fmt: skip
    inputs = StepInputs(device, StepShape(num_tokens, len(batch.logit_rows), 1, pool.num_blocks))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    Launcher(model, pool).run(inputs.send(batch), False, None)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
