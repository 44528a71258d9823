"""Decode steps in padded, static shapes: a graph computes the same as the step alone. Captured on a GPU;
on a CPU replayed by computing again, with Triton's interpreter for attention."""

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.attention import triton_paged
from baton.engine.attention.triton_paged import FEW_QUERIES
from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.execute.graphs import CHUNK_STEP, CudaCapture, StepGraphs, chunk_sizes, ladder, widths
from baton.engine.execute.inputs import StepInputs, StepShape, StepViews
from baton.engine.kv.pool import KVPool
from baton.engine.models.loader import load_model
from kvtransfer.layout import KVLayout
from tests.support.engine.graphs import replay_by_computing
from tests.support.model_folders.families import make_few_heads, random_ids

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there"
)
BLOCK_SIZE, NUM_BLOCKS, CONTEXT = 16, 24, 96


class GraphHarness:
    """One model, two pools of the same content: steps run in graphs, and as they are."""

    def __init__(self, folder, chunks=()):
        make_few_heads(folder)
        self.model = load_model(EngineConfig(folder, attention="triton"), DEVICE)
        layout = KVLayout((self.model.kv_group("fp32", BLOCK_SIZE),))
        self.pools = [KVPool(layout, NUM_BLOCKS, device=DEVICE) for _ in range(2)]
        table = layout.num_blocks(CONTEXT)
        self.inputs = [StepInputs(DEVICE, StepShape(32, 32, 8, table)) for _ in range(2)]
        capture = CudaCapture() if DEVICE.type == "cuda" else replay_by_computing
        with torch.inference_mode():
            self.graphs = StepGraphs(
                self.model, self.pools[0], self.inputs[0], (1, 4), (1, 3), chunks, CONTEXT, capture
            )
        content = torch.randn(self.pools[0].blocks.shape, device=DEVICE)
        for pool in self.pools:
            pool.blocks.copy_(content)

    def batch(self, kv_lens: list[int], width: int) -> ForwardBatch:
        """Sequences with blocks of their own, `width` new tokens each."""
        free, seqs, slots, positions = list(range(NUM_BLOCKS)), [], [], []
        for index, kv_len in enumerate(kv_lens):
            blocks = [free.pop() for _ in range(-(-kv_len // BLOCK_SIZE))]
            seqs.append(SeqSlice(index * width, width, kv_len, torch.tensor(blocks)))
            positions += range(kv_len - width, kv_len)
            slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(kv_len - width, kv_len)]
        ids, rows = random_ids(len(slots), len(kv_lens)), torch.arange(len(slots))
        return ForwardBatch(torch.tensor(ids), torch.tensor(positions), torch.tensor(slots), seqs, rows)

    def check(self, kv_lens: list[int], width: int, num_rows: int | None = None) -> None:
        """`num_rows`: that want logits; None: all."""
        batch = self.batch(kv_lens, width)
        if num_rows is not None:
            batch = replace(batch, logit_rows=batch.logit_rows[width - num_rows :])
        shape = self.graphs.shape_for(batch)
        with torch.inference_mode():
            _, logits = self.graphs.run(batch, shape)
            wanted = self.model.forward(self.inputs[1].send(batch), self.pools[1])
        assert logits.shape == wanted.shape
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(self.pools[0].blocks, self.pools[1].blocks, rtol=1e-4, atol=1e-4)


def test_graphs_compute_what_the_steps_do(tmp_path):
    harness = GraphHarness(tmp_path)
    assert len(harness.graphs) == 4
    for kv_lens, width in (([33], 1), ([33, 7, 90], 1), ([5, 60, 61, 62], 1), ([17, 80, 3], 3), ([2], 1)):
        harness.check(kv_lens, width)
    assert harness.graphs.shape_for(harness.batch([40, 50], 2)) is None  # no graph of that width
    assert harness.graphs.shape_for(harness.batch([20, 20, 20, 20, 20], 1)) is None  # too many
    mixed = harness.batch([40, 50], 3)
    mixed.seqs[1] = SeqSlice(3, 1, 48, mixed.seqs[1].block_ids)
    assert harness.graphs.shape_for(mixed) is None


def test_chunks_in_graphs_compute_what_they_do_alone(tmp_path, monkeypatch):
    """Of any length up to the largest, behind any prefix, with the last row's logits and without; what pads a chunk is
    written nowhere."""
    monkeypatch.setattr(triton_paged, "FEW_QUERIES", 1)  # chunks of 8 tokens, for the interpreter, are not split
    harness = GraphHarness(tmp_path, (8,))
    for kv_len, width, num_rows in ((8, 8, 1), (90, 3, 1), (33, 2, 0), (50, 1, 0)):
        harness.check([kv_len], width, num_rows)
    one, two = harness.batch([9], 9), harness.batch([40, 40], 4)
    for batch in (replace(one, logit_rows=one.logit_rows[8:]), replace(two, logit_rows=two.logit_rows[[3, 7]])):
        assert harness.graphs.shape_for(batch) is None  # too long; two of them
    assert CHUNK_STEP > FEW_QUERIES


def test_padding_repeats_the_shortest():
    """A padding sequence writes the values that are there already."""
    inputs = StepInputs(torch.device("cpu"), StepShape(8, 8, 4, 3))
    seqs = [SeqSlice(0, 2, 40, torch.tensor([5, 6, 7])), SeqSlice(2, 2, 18, torch.tensor([8, 9]))]
    rows = torch.arange(4)
    batch = ForwardBatch(rows + 100, torch.tensor([38, 39, 16, 17]), torch.tensor([1, 2, 3, 4]), seqs, rows)
    shape = StepShape(8, 8, 4, 3)
    inputs.send_padded(batch, shape)
    parts = StepViews.of(inputs._target, shape)
    assert parts.token_ids.tolist() == [100, 101, 102, 103, 102, 103, 102, 103]
    assert parts.slots.tolist() == [1, 2, 3, 4, 3, 4, 3, 4] and parts.positions.tolist()[4:6] == [16, 17]
    assert parts.kv_lens.tolist() == [40, 18, 18, 18] and parts.query_starts.tolist() == [0, 2, 4, 6, 8]
    assert inputs.static(shape, 2, 48).table.block_ids.tolist() == [[5, 6, 7], [8, 9, 0], [8, 9, 0], [8, 9, 0]]
    assert parts.logit_rows.tolist() == list(range(8))


def test_padding_of_a_chunk_is_not_written():
    shape = StepShape(8, 1, 1, 3)
    inputs = StepInputs(torch.device("cpu"), shape)
    inputs._hosts[1].fill_(7)  # of the step before
    rows, seqs = torch.arange(5), [SeqSlice(0, 5, 40, torch.tensor([5, 6, 7]))]
    inputs.send_padded(ForwardBatch(rows + 100, rows + 35, rows + 200, seqs, rows[:0]), shape)
    parts = StepViews.of(inputs._target, shape)
    assert parts.token_ids.tolist() == [100, 101, 102, 103, 104, 0, 0, 0] and parts.positions.tolist()[5:] == [0] * 3
    assert parts.slots.tolist() == [200, 201, 202, 203, 204, -1, -1, -1] and parts.logit_rows.tolist() == [4]
    assert parts.query_starts.tolist() == [0, 5] and parts.kv_lens.tolist() == [40]


def test_a_mixed_step_is_sent_as_it_is():
    inputs = StepInputs(torch.device("cpu"), StepShape(64, 64, 4, 9))
    seqs = [SeqSlice(0, 1, 20, torch.tensor([3, 4])), SeqSlice(1, 5, 5, torch.tensor([7]))]
    ids = torch.arange(6)
    sent = inputs.send(ForwardBatch(ids, ids + 1, ids + 2, seqs, torch.tensor([0, 5])))
    assert sent.token_ids.tolist() == ids.tolist() and sent.logit_rows.tolist() == [0, 5]
    assert sent.table.query_starts.tolist() == [0, 1, 6] and sent.table.kv_lens.tolist() == [20, 5]
    assert sent.table.block_ids.tolist() == [[3, 4], [7, 0]]
    assert (sent.table.max_query_len, sent.table.max_kv_len) == (5, 20)
    assert [seq.block_ids.tolist() for seq in sent.seqs] == [[3, 4], [7, 0]]


def test_the_ladder_of_batch_sizes_has_small_steps():
    assert ladder(1) == [1] and ladder(3) == [1, 2, 3] and ladder(16) == [1, 2, 4, 8, 16]
    sizes = ladder(256)
    assert sizes[0] == 1 and sizes[-1] == 256 and sizes == sorted(set(sizes))
    assert all(large - small <= max(8, small // 8) for small, large in zip(sizes, sizes[1:], strict=False))
    assert chunk_sizes(8192) == [64, 128, 192, 256, 320, 384, 448, 512] and chunk_sizes(130) == [64, 128]
    assert widths(False, None) == [1] and widths(True, 4) == [1, 5] and widths(True, None)[-1] == 17


def test_all_captures_are_warmed_on_one_stream(monkeypatch):
    """torch keeps a workspace of cuBLAS for each stream, which nobody has measured."""
    made, warmed = [], []

    def stream():
        made.append(SimpleNamespace(wait_stream=lambda other: None))
        return made[-1]

    def on(stream):
        warmed.append(stream)
        return nullcontext()

    current = SimpleNamespace(wait_stream=lambda other: None)
    stand_in = dict(Stream=stream, stream=on, current_stream=lambda: current, graph_pool_handle=lambda: 0)
    stand_in |= dict(CUDAGraph=lambda: SimpleNamespace(replay=None), graph=lambda *given, **options: nullcontext())
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capture = CudaCapture()
    for _ in range(3):
        capture(tuple)
    assert len(warmed) == 3 and len(made) == 1
