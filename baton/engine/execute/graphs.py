"""Steps as CUDA graphs: one launch instead of one per kernel.

Decode   all sequences have the same number of tokens, one, or one and as many proposals: a ladder of batch sizes for
         each such width
Chunks   of one prompt alone, up to MAX_CHUNK tokens: every CHUNK_STEP tokens

A step runs in the next larger graph of its kind; graphs read the same buffers (inputs.py), leave their outputs in the
same ones, and share one pool of memory, the largest captured first so that the others fit into what it took. Larger
chunks, several of them, and steps that mix widths run eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine.core.batch import FIRST_STATE, ForwardBatch, SeqSlice
from baton.engine.execute.inputs import StepInputs, StepShape
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.parallel.collectives import RankLost
from baton.protocol import MAX_DRAFT_TOKENS

Outputs = tuple[Tensor, Tensor]  # of the rows that want logits: hidden [R, hidden_size], logits fp32 [R, vocab_size]
Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
MAX_CHUNK = 512  # tokens; of more, launching takes a small part of the time
CHUNK_STEP = 64  # above attention's FEW_QUERIES: a chunk is never split by its positions
NUM_WARM_RUNS = 2  # before a capture: kernels are compiled, libraries take their workspaces


class StepGraphs:
    """The graphs of one model and pool. Belongs to the loop's thread."""

    def __init__(
        self, model: Model, pool: KVPool, inputs: StepInputs, sizes: Sequence[int], widths: Sequence[int],
        chunks: Sequence[int], max_kv_len: int, capture: Capture,
    ):  # fmt: skip
        """`sizes`: sequences, ascending; `widths`: tokens of each; `chunks`: tokens of a prompt, ascending;
        `capture(run)` -> (replay, its outputs)."""
        self._model, self._pool, self._inputs, self._max_kv_len = model, pool, inputs, max_kv_len
        self._sizes, self._chunks = tuple(sizes), tuple(chunks)
        self._num_blocks = pool.layout.num_blocks(max_kv_len)
        self._graphs: dict[StepShape, tuple[Callable[[], None], Outputs]] = {}
        shapes = [self._shape(size, width) for width in widths for size in sizes]
        shapes += [self._chunk_shape(size) for size in chunks]
        largest = max(shape.num_rows for shape in shapes)
        # Of all graphs: logits of each would take 0.5 MB a row and vocabulary of 128k, 1.4 GB for a ladder up to 256.
        self._hidden = torch.empty(largest, model.spec.hidden_size, dtype=model.dtype, device=pool.device)
        self._logits = torch.empty(largest, model.spec.vocab_size, dtype=torch.float32, device=pool.device)
        for shape in sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True):
            self._graphs[shape] = capture(self._step(shape))

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_for(self, batch: ForwardBatch) -> StepShape | None:
        """Return the shape of the graph that a step runs in; None: it has none."""
        seqs = batch.seqs
        width, num_tokens, num_rows = seqs[0].query_len, len(batch.token_ids), len(batch.logit_rows)
        if num_tokens == len(seqs) * width == num_rows and len(seqs) <= self._sizes[-1]:
            shape = self._shape(self._sizes[bisect_left(self._sizes, len(seqs))], width)
            return shape if shape in self._graphs and all(seq.query_len == width for seq in seqs) else None
        if len(seqs) == 1 and num_rows <= 1 and self._chunks and width <= self._chunks[-1]:
            return self._chunk_shape(self._chunks[bisect_left(self._chunks, width)])
        return None

    def run(self, batch: ForwardBatch, shape: StepShape, before: Tensor | None = None) -> Outputs:
        """Replay the graph of `shape` on `batch`, made on the host; `before`: tokens int64 [R] of the launch before it.
        Returns hidden [R, hidden_size] and logits fp32 [R, vocab_size], which last until the next run."""
        self._inputs.send_padded(batch, shape, before)
        replay, (hidden, logits) = self._graphs[shape]
        replay()
        num_rows = len(batch.logit_rows)
        return hidden[:num_rows], logits[:num_rows]

    def replay(self, num_seqs: int) -> None:
        """Replay the graph of plain decode for `num_seqs` sequences, on its inputs as they are."""
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._graphs[self._shape(size, 1)][0]()

    def _shape(self, size: int, width: int) -> StepShape:
        return StepShape(size * width, size * width, size, self._num_blocks, self._pool.states is not None)

    def _chunk_shape(self, size: int) -> StepShape:
        return StepShape(size, 1, 1, self._num_blocks, self._pool.states is not None)

    def _step(self, shape: StepShape) -> Callable[[], Outputs]:
        """Make new views in every call: the pool's cache of a step, keyed by its tensors, is then built again too."""
        width = shape.num_tokens // shape.num_seqs

        def run() -> Outputs:
            batch = self._inputs.static(shape, width, self._max_kv_len)
            hidden = self._hidden[: shape.num_rows]
            torch.index_select(self._model.hidden(batch, self._pool), 0, batch.logit_rows, out=hidden)
            return hidden, self._model.logits(hidden, self._logits[: shape.num_rows])

        self._inputs.send_padded(first_step(width, shape.num_rows // shape.num_seqs, shape.has_states), shape)
        return run


def first_step(width: int, num_rows: int, has_states: bool) -> ForwardBatch:
    """Return a step of one sequence of `width` tokens, the last `num_rows` with logits, on the host. It is in the
    pool's first blocks, that no request has before serving."""
    block_ids = torch.zeros(width, dtype=torch.int64, device="cpu")
    rows = torch.arange(width, device="cpu")
    seqs = [SeqSlice(0, width, width, block_ids, FIRST_STATE if has_states else None)]
    return ForwardBatch(torch.zeros_like(rows), rows, rows, seqs, rows[width - num_rows :])


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes: at most an eighth of a step is padding from 8 sequences on."""
    sizes = [1, 2, 4]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(4, sizes[-1] // 64 * 8, 8 if sizes[-1] >= 8 else 0))
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def widths(speculates: bool, num_draft_tokens: int | None) -> list[int]:
    """Tokens of a sequence in one step: its last one, and proposals."""
    if not speculates:
        return [1]
    return [1, num_draft_tokens + 1] if num_draft_tokens else [1, 2, 3, 4, 5, 9, MAX_DRAFT_TOKENS + 1]


def chunk_sizes(most: int) -> list[int]:
    """Return the tokens of the chunks that have graphs; `most`: of any chunk."""
    return list(range(CHUNK_STEP, min(most, MAX_CHUNK) + 1, CHUNK_STEP))


class CudaCapture:
    """`Capture` on the current device."""

    def __init__(self, stream: torch.cuda.Stream | None = None):
        """`stream`: to capture on, where the kernels belong to a green context; None: one is made."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = run()
        return graph.replay, outputs


class AgreedCapture:
    """`Capture` by several ranks: what one of them cannot capture, none does. A graph has rows of padding in the sums
    of all."""

    def __init__(self, capture: Capture, least: Callable[[int], int]):
        """`least`: the smallest number that a rank calls it with; all ranks call it together."""
        self._capture, self._least = capture, least

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        captured, why = None, "another rank cannot capture them"
        try:
            captured = self._capture(run)
        except RankLost:
            raise
        except Exception as error:  # a kernel for which a GPU has too little is no RuntimeError
            why = f"{type(error).__name__}: {error}"
        if not self._least(int(captured is not None)) or captured is None:
            raise RuntimeError(why)
        return captured
