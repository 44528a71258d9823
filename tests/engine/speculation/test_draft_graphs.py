"""A draft model's passes in the GPU launcher's graphs, with the device replaced, propose what they propose without."""

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.execute import launcher
from baton.engine.execute.launcher import GpuLauncher
from baton.engine.speculation.proposers.draft_model import DraftModel
from baton.engine.speculation.proposers.proposer import Draftee, DraftRequest
from tests.support.engine.graphs import replay_by_computing
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_few_heads, random_ids

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its device is replaced here"),
    pytest.mark.skipif(kernels.INTERPRETED is False, reason="Triton's interpreter is off in this process"),
]


def make_draft(folder) -> DraftModel:
    config = EngineConfig(
        folder, device="cpu", attention="triton", block_size=32, num_blocks=8, max_num_seqs=2, max_model_len=64,
        max_num_batched_tokens=66, threads=1,
    )  # fmt: skip
    engine = Engine.load(config)
    draft = DraftModel(engine.runner.model, engine.pool, engine.config, 0)
    draft._passes = None  # of a CPU
    return draft


def test_passes_in_graphs_propose_what_they_propose_without(tmp_path, monkeypatch):
    """Two sequences, of which one lacks a token and the other two: both read two, in one graph."""
    monkeypatch.setattr(launcher, "chunk_sizes", lambda most: [])
    monkeypatch.setattr(launcher, "widths", lambda *given: [1, 2])  # of more: seconds in the interpreter
    monkeypatch.setattr(launcher, "CudaCapture", lambda stream: replay_by_computing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
    make_few_heads(tmp_path)
    eager, in_graphs = make_draft(tmp_path), make_draft(tmp_path)
    in_graphs.use_launcher(lambda model, pool, config: GpuLauncher(model, pool, config, True))
    shapes, run_graph = [], in_graphs._launcher._graphs.run
    in_graphs._launcher._graphs.run = lambda batch, shape, *before: (
        shapes.append(shape) or run_graph(batch, shape, *before)
    )

    records = [random_ids(3, 1), random_ids(4, 2)]
    requests = [
        engine_request("greedy", records[0], 8),
        engine_request("sampled", records[1], 8, temperature=0.9, seed=3, top_p=0.9),
    ]
    sides = [[Draftee(request, 0, list(record)) for request, record in zip(requests, records)] for _ in range(2)]
    for draft, draftees in zip((eager, in_graphs), sides):
        for draftee in draftees:
            draft.open(draftee)

    def proposed(num_tokens: int) -> list[list[int]]:
        eagerly, graphed = (
            draft.propose([DraftRequest(draftee, num_tokens) for draftee in draftees])
            for draft, draftees in zip((eager, in_graphs), sides)
        )
        assert graphed == eagerly and all(len(each) == num_tokens for each in graphed)
        return graphed

    def accept(*token_ids: list[int]) -> None:
        for draftees in sides:
            for draftee, more in zip(draftees, token_ids, strict=True):
                draftee.token_ids += more

    first = proposed(2)
    assert [(shape.num_tokens, shape.num_seqs) for shape in shapes] == [(2, 2)], "prompts are read eagerly"
    wrong = (first[0][0] + 1) % eager.model.spec.vocab_size
    accept([wrong], [*first[1], 5])  # the one lacks that token; of the other the last guess was never read either
    proposed(3)
    assert [(shape.num_tokens, shape.num_seqs) for shape in shapes[1:]] == [(4, 2), (2, 2), (2, 2)]
    for draft, draftees in zip((eager, in_graphs), sides):
        for draftee in draftees:
            draft.close(draftee)
        assert draft.num_free_blocks == 8
