"""Run steps as CUDA graphs: one launch instead of one for each kernel.

Decode   every sequence has one token, or one and the same number of proposals: a ladder of batch sizes
         for each such width
Chunks   a step with a chunk of one prompt alone, up to MAX_CHUNK tokens: a graph for every CHUNK_STEP tokens

A step runs in the next larger graph of its kind. All graphs read the same input buffers (inputs.py), write the same
output buffers and share one memory pool; the largest is captured first, so that the others fit into its memory. Larger
chunks, several chunks, and steps that mix widths run eagerly.
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

Outputs = tuple[Tensor, Tensor]  # of the rows with logits: hidden [R, hidden_size], logits fp32 [R, vocab_size]
Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
MAX_CHUNK = 512  # tokens; launching takes a small part of the time of longer ones
CHUNK_STEP = 64  # above attention's FEW_QUERIES, so that a chunk is never split by its positions
NUM_WARM_RUNS = 2  # before a capture, so that kernels are compiled and libraries have their workspaces


class StepGraphs:
    """The graphs of one model and pool. Belongs to the loop's thread."""

    def __init__(
        self, model: Model, pool: KVPool, inputs: StepInputs, sizes: Sequence[int], widths: Sequence[int],
        chunks: Sequence[int], max_kv_len: int, capture: Capture,
    ):  # fmt: skip
        """Capture the graphs of decode steps, `sizes` (sequences, ascending) by `widths` (tokens of each), and of
        `chunks`.

        `chunks`: tokens, ascending. `capture(run)` returns a function that replays the graph, and its outputs.
        """
        self._model, self._pool, self._inputs, self._max_kv_len = model, pool, inputs, max_kv_len
        self._sizes, self._chunks = tuple(sizes), tuple(chunks)
        self._num_blocks = pool.layout.num_blocks(max_kv_len)
        self._graphs: dict[StepShape, tuple[Callable[[], None], Outputs]] = {}
        shapes = [self._shape(size, width) for width in widths for size in sizes]
        shapes += [self._chunk_shape(size) for size in chunks]
        largest = max(shape.num_rows for shape in shapes)
        # Shared by all graphs: separate logits would take 0.5 MB a row with a vocabulary of 128k, 1.4 GB for sizes up
        # to 256.
        self._hidden = torch.empty(largest, model.spec.hidden_size, dtype=model.dtype, device=pool.device)
        self._logits = torch.empty(largest, model.spec.vocab_size, dtype=torch.float32, device=pool.device)
        for shape in sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True):
            self._graphs[shape] = capture(self._step(shape))

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_for(self, batch: ForwardBatch) -> StepShape | None:
        """Return the shape of the graph that a step runs in, or None if there is none."""
        seqs = batch.seqs
        width, num_tokens, num_rows = seqs[0].query_len, len(batch.token_ids), len(batch.logit_rows)
        if num_tokens == len(seqs) * width == num_rows and len(seqs) <= self._sizes[-1]:
            shape = self._shape(self._sizes[bisect_left(self._sizes, len(seqs))], width)
            return shape if shape in self._graphs and all(seq.query_len == width for seq in seqs) else None
        if len(seqs) == 1 and num_rows <= 1 and self._chunks and width <= self._chunks[-1]:
            return self._chunk_shape(self._chunks[bisect_left(self._chunks, width)])
        return None

    def run(self, batch: ForwardBatch, shape: StepShape, previous_tokens: Tensor | None = None) -> Outputs:
        """Replay the graph of `shape` on `batch`, which is on the host.

        `previous_tokens`: int64 [R], of the previous launch. Returns hidden [R, hidden_size] and logits fp32 [R,
        vocab_size], which the next run overwrites.
        """
        self._inputs.send_padded(batch, shape, previous_tokens)
        replay, (hidden, logits) = self._graphs[shape]
        replay()
        num_rows = len(batch.logit_rows)
        return hidden[:num_rows], logits[:num_rows]

    def replay(self, num_seqs: int) -> None:
        """Replay the graph of plain decode for `num_seqs` sequences on the inputs that are in its buffers."""
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._graphs[self._shape(size, 1)][0]()

    def _shape(self, size: int, width: int) -> StepShape:
        return StepShape(size * width, size * width, size, self._num_blocks, self._pool.states is not None)

    def _chunk_shape(self, size: int) -> StepShape:
        return StepShape(size, 1, 1, self._num_blocks, self._pool.states is not None)

    def _step(self, shape: StepShape) -> Callable[[], Outputs]:
        """Return a function that runs a step of this shape. Every call makes new views, so the pool's cache is rebuilt
        too."""
        width = shape.num_tokens // shape.num_seqs

        def run() -> Outputs:
            batch = self._inputs.static(shape, width, self._max_kv_len)
            hidden = self._hidden[: shape.num_rows]
            torch.index_select(self._model.hidden(batch, self._pool), 0, batch.logit_rows, out=hidden)
            return hidden, self._model.logits(hidden, self._logits[: shape.num_rows])

        self._inputs.send_padded(first_step(width, shape.num_rows // shape.num_seqs, shape.has_states), shape)
        return run


def first_step(width: int, num_rows: int, has_states: bool) -> ForwardBatch:
    """Return a step of one sequence of `width` tokens, the last `num_rows` with logits, on the host.

    It writes to the pool's first blocks, which no request has before serving.
    """
    block_ids = torch.zeros(width, dtype=torch.int64, device="cpu")
    rows = torch.arange(width, device="cpu")
    seqs = [SeqSlice(0, width, width, block_ids, FIRST_STATE if has_states else None)]
    return ForwardBatch(torch.zeros_like(rows), rows, rows, seqs, rows[width - num_rows :])


def ladder(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of graphs; from 8 sequences on, at most an eighth of a step is padding."""
    sizes = [1, 2, 4]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(4, sizes[-1] // 64 * 8, 8 if sizes[-1] >= 8 else 0))
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def widths(speculates: bool, num_draft_tokens: int | None) -> list[int]:
    """Return the numbers of tokens that a decoding sequence may have in a step: its last one, and proposals."""
    if not speculates:
        return [1]
    return [1, num_draft_tokens + 1] if num_draft_tokens else [1, 2, 3, 4, 5, 9, MAX_DRAFT_TOKENS + 1]


def chunk_sizes(most: int) -> list[int]:
    """Return the tokens of the chunks that have graphs, when no chunk has more than `most`."""
    return list(range(CHUNK_STEP, min(most, MAX_CHUNK) + 1, CHUNK_STEP))


class CudaCapture:
    """Captures a function as a CUDA graph on the current device."""

    def __init__(self, stream: torch.cuda.Stream | None = None):
        """Take the stream of a green context to capture on, or None for a new stream."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream
        # One for all: torch keeps a workspace of cuBLAS for each stream for good, 32 MiB on Hopper.
        self._warming = stream or torch.cuda.Stream()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        stream = self._warming
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
    """Captures on several ranks: if one rank fails, none captures, since a graph's padding takes part in sums of
    all."""

    def __init__(self, capture: Capture, least: Callable[[int], int]):
        """Take a rank's capture and `least`, which all ranks call together and which returns the smallest argument."""
        self._capture, self._least = capture, least

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        captured, why = None, "another rank cannot capture them"
        try:
            captured = self._capture(run)
        except RankLost:
            raise
        except Exception as error:  # a kernel that needs more than the GPU has raises no RuntimeError
            why = f"{type(error).__name__}: {error}"
        if not self._least(int(captured is not None)) or captured is None:
            raise RuntimeError(why)
        return captured
