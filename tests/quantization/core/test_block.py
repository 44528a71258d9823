"""The calibration's layer computes what the engine's does, and folding leaves it as it is."""

import pytest
import torch
import torch.nn.functional as F

from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from baton.quantization.core.block import DOWN, STAGES, Stage, linear_shapes
from baton.quantization.core.folding import fold, shared, spread
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import random_ids
from tests.support.model_folders.models_hard_to_quantize import blocks, make_family

FAMILIES = ("llama3.1", "llama-mqa-bias", "llama-head-dim", "mistral", "qwen2-window", "qwen3-tied")


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_in_a_row_are_the_model(tmp_path, name):
    folder = make_family(tmp_path, name)
    spec, weights, layers = blocks(folder)
    ids = random_ids(50, 1)
    x = [F.embedding(torch.tensor(ids), weights.read("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)))]
    for block in layers:
        x = block.run(x)
    model = load_model(EngineConfig(folder, dtype="fp32"))
    expected = ManualBatch(model).step({"a": ids})["a"]
    torch.testing.assert_close(model.logits(x[0]), expected, atol=2e-4, rtol=1e-3)


def test_every_linear_is_visited_once_with_its_inputs(tmp_path):
    spec, _, (block, *_) = blocks(make_family(tmp_path, "llama2"))
    seen = {}

    def visit(stage: Stage) -> None:
        seen.update((name, [x.shape for x in stage.inputs]) for name in stage.names)

    block.run([torch.randn(5, spec.hidden_size), torch.randn(3, spec.hidden_size)], visit)
    assert list(seen) == [name for names in STAGES for name in names] == list(linear_shapes(spec))
    for name, (_, width) in linear_shapes(spec).items():
        assert seen[name] == [(5, width), (3, width)]


def test_replaced_weights_produce_what_later_stages_read(tmp_path):
    spec, _, (block, *_) = blocks(make_family(tmp_path, "llama2"))

    def visit(stage: Stage) -> None:
        if DOWN in stage.names:
            assert all((x == 0).all() for x in stage.inputs)
        for name in stage.names:
            block.weights[name] = torch.zeros_like(block.weights[name])

    x = torch.randn(4, spec.hidden_size)
    assert torch.equal(block.run([x], visit)[0], x)


@pytest.mark.parametrize("name", ("llama2", "llama-mqa-bias", "qwen3"))
def test_folding_changes_no_output(tmp_path, name):
    """Before anything is rounded, fp32 outputs stay equal for any scales, with KV heads shared and biases too."""
    spec, _, (block, *_) = blocks(make_family(tmp_path, name))
    x = [torch.randn(20, spec.hidden_size), torch.randn(7, spec.hidden_size)]
    before = block.run(x)
    generator = torch.Generator().manual_seed(0)

    def visit(stage: Stage) -> None:
        channels = shared(block, stage, stage.largest())
        fold(block, stage, torch.rand(len(channels), generator=generator) * 4 + 0.1, torch.float32)

    for folded in (block.run(x, visit), block.run(x)):  # while folding, and from then on
        for found, expected in zip(folded, before, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_a_rounded_norm_costs_nothing(tmp_path):
    """A norm that is divided and then stored in bf16: the weights take up exactly what it lost."""
    spec, _, (block, *_) = blocks(make_family(tmp_path, "llama2", torch.bfloat16))
    x = [torch.randn(20, spec.hidden_size)]
    before = block.run(x)
    scales = torch.rand(spec.hidden_size) * 3 + 0.1

    def visit(stage: Stage) -> None:
        if stage.source in block.norms:
            fold(block, stage, scales, torch.bfloat16)
            assert torch.equal(block.norms[stage.source], block.norms[stage.source].bfloat16().float())

    block.run(x, visit)
    torch.testing.assert_close(block.run(x)[0], before[0], atol=1e-4, rtol=1e-3)


def test_shared_and_spread_follow_the_query_heads(tmp_path):
    """Query heads 0 and 1 read KV head 0, 2 and 3 the other."""
    spec, _, (block, *_) = blocks(make_family(tmp_path, "llama3"))
    stage = Stage(STAGES[1], [])
    values = torch.arange(spec.num_heads * spec.head_dim).float()
    heads = shared(block, stage, values).view(spec.num_kv_heads, spec.head_dim)
    assert torch.equal(heads, values.view(spec.num_kv_heads, -1, spec.head_dim).amax(dim=1))
    again = spread(block, stage, heads.flatten()).view(spec.num_heads, spec.head_dim)
    assert torch.equal(again, heads.repeat_interleave(2, dim=0))
