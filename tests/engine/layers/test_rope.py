"""Rotary frequencies against transformers' own, and tables whose rows do not depend on how they were made."""

import math

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.engine.core.model_spec import RopeSpec
from baton.engine.layers.rope import Rope, attention_scale

HEAD_DIM = 16
LONG = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-truncate": {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 16},
    "yarn-factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": LONG, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def make(name: str, max_position_embeddings: int = 256) -> tuple[RopeSpec, LlamaRotaryEmbedding]:
    kind, parameters = name.split("-")[0], dict(KINDS[name])
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )
    original = parameters.pop("original_max_position_embeddings", max_position_embeddings)
    return RopeSpec(
        kind=kind,
        theta=10000.0,
        max_position_embeddings=max_position_embeddings,
        original_context=original,
        parameters=parameters,
    ), LlamaRotaryEmbedding(config)


def ours(rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers lays them out: sine without the sign of the first half."""
    cos, sin = (table.squeeze(1) for table in rope.tables(positions, torch.float32))
    return cos, torch.cat((-sin[:, : HEAD_DIM // 2], sin[:, HEAD_DIM // 2 :]), dim=1)


def assert_same(rope: Rope, theirs: LlamaRotaryEmbedding, positions: torch.Tensor, called_with: torch.Tensor):
    cos, sin = (table[0, -len(positions) :] for table in theirs(torch.zeros(1), called_with.unsqueeze(0)))
    torch.testing.assert_close(ours(rope, positions)[0], cos, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours(rope, positions)[1], sin, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_within_the_original_context(name):
    spec, theirs = make(name)
    positions = torch.arange(spec.original_context)
    assert_same(Rope(spec, HEAD_DIM, spec.context), theirs, positions, positions)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"factor": 4.0, "attn_factor": 0.8782488562869419}, 1.0),  # DeepSeek-R1-0528-Qwen3-8B's
        ({"factor": 4.0, "attn_factor": 0.8782488562869419, "attention_factor": 0.7}, 0.7),
        ({"factor": 4.0, "attn_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.5),
        ({"factor": 4.0, "attn_factor": None}, 0.1 * math.log(4) + 1),
    ],
)
def test_what_yarn_is_multiplied_by(parameters, expected):
    assert attention_scale(
        RopeSpec(kind="yarn", theta=1e6, max_position_embeddings=131072, original_context=32768, parameters=parameters)
    ) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
def test_beyond_it_where_length_plays_no_part(name):
    spec, theirs = make(name)
    positions = torch.arange(256)
    assert_same(Rope(spec, HEAD_DIM, 256), theirs, positions, positions)


def test_dynamic_token_by_token():
    """Beyond the original context every position turns as transformers turns the last token of a sequence."""
    spec, theirs = make("dynamic", max_position_embeddings=64)
    rope = Rope(spec, HEAD_DIM, spec.context)
    assert spec.context == 128
    for position in range(60, 128):
        assert_same(rope, theirs, torch.tensor([position]), torch.tensor([position]))


def test_longrope_takes_the_long_factors_when_more_is_served():
    spec, theirs = make("longrope")
    positions = torch.arange(200)
    assert_same(Rope(spec, HEAD_DIM, 256), theirs, positions, positions)


@pytest.mark.parametrize("name", KINDS)
def test_tables_depend_on_nothing_but_the_model(name):
    """Two workers with other contexts and other numbers of threads rotate alike, bit for bit."""
    spec, _ = make(name, max_position_embeddings=500)
    positions = torch.arange(spec.original_context - 1)
    before = torch.get_num_threads()
    try:
        tables = []
        for num_threads, max_model_len in ((1, spec.original_context), (2, spec.original_context - 1)):
            torch.set_num_threads(num_threads)
            tables.append(Rope(spec, HEAD_DIM, max_model_len).tables(positions, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tables[0][0], tables[1][0]) and torch.equal(tables[0][1], tables[1][1])


def test_rotation_keeps_relative_positions():
    rope = Rope(make("default")[0], HEAD_DIM, 256)
    q, k = torch.randn(2, 1, HEAD_DIM).unbind()
    products = []
    for shift in (0, 100):
        tables = [rope.tables(torch.tensor([position + shift]), torch.float32) for position in (7, 3)]
        products.append((rope(q.unsqueeze(0), *tables[0]) * rope(k.unsqueeze(0), *tables[1])).sum())
    torch.testing.assert_close(products[0], products[1], atol=1e-4, rtol=0)
