"""Families on 2 and 4 ranks: the logits of transformers within 1e-4, and in fp32 and bf16 the bits of one rank."""

from dataclasses import replace

import pytest
import torch

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from tests.support.engine.folders import SMALL, Hand, make_folder, random_ids
from tests.support.engine.published import dense_folder, write_gptq
from tests.support.native.ranked import ranked

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "there")
TOLERANCE = 1e-4
# What of a family is cut, each in another way: KV heads that several ranks have, a head that is the embedding, biases behind
# sums, projections that one tensor holds, heads whose elements are reordered, norms of each head, attention beside the MLP.
FAMILIES = {
    "llama3": {},
    "llama3.2-tied": {},
    "llama-mqa-bias": {},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": {},
    "smollm3": {},
    "gemma3": {},
    "phi3": {"hidden_size": 64},
    "granite": {},
    "glm4": {},
    "command-r": {},
    "starcoder2": {"hidden_size": 64},
    "olmo2": {},
    "mixtral": {},
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "gpt-oss": {},
    "deepseek-v2": {"v_head_dim": 16},
    "deepseek-v3": {"hidden_size": 64, "v_head_dim": 16},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(hand: Hand, ids: list[int]) -> torch.Tensor:
    """A chunk, another one behind it, then single tokens beside a second sequence."""
    found = [hand.step({"a": ids[:30]})["a"], hand.step({"a": ids[30:70], "b": ids[:9]})["a"]]
    return torch.cat([*found, *(hand.step({"a": [token], "b": [token]})["a"] for token in ids[70:])])


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_have_the_bits_of_one(tmp_path, name):
    changes = FAMILIES[name]
    head_dim = {} if "hidden_size" in changes else {"head_dim": 16}
    reference = make_folder(tmp_path, name, **changes, **head_dim)
    ids = random_ids(76, 1)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0]
    for dtype in ("fp32", "bf16"):
        config = EngineConfig(tmp_path, dtype=dtype)
        whole = Hand(load_model(config), form=dtype)
        expected = logits_of(whole, ids)
        for degree in (2, 4):
            hand = Hand(whole.model, form=dtype)
            with ranked(config, degree, hand.pool) as (hand.model, hand.pool):
                found = logits_of(hand, ids)
            assert torch.equal(found, expected), f"{degree} ranks in {dtype}"
            assert torch.equal(hand.pool.bytes, whole.pool.bytes), "KV"
        if dtype == "fp32":
            torch.testing.assert_close(expected, theirs, atol=TOLERANCE, rtol=0)
            assert expected.shape[1] == SMALL["vocab_size"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"num_local_experts": 4, "hidden_size": 64}),
        ("qwen2-moe", {"num_experts": 8, "shared_expert_intermediate_size": 64, "hidden_size": 64}),
        ("gpt-oss", {"num_local_experts": 8, "hidden_size": 64}),
        ("deepseek-v3", {"hidden_size": 64, "v_head_dim": 16}),
    ],
)
def test_experts_of_which_each_rank_has_some_whole(tmp_path, name, changes):
    """As above; a rank has room for no others."""
    make_folder(tmp_path, name, **changes)
    config, ids = EngineConfig(tmp_path, dtype="bf16"), random_ids(76, 1)
    whole = Hand(load_model(config), form="bf16")
    expected = logits_of(whole, ids)
    for degree in (2, 4):
        hand, options = Hand(whole.model, form="bf16"), {"tensor_parallel": degree, "expert_parallel": True}
        with ranked(replace(config, **options), degree, hand.pool) as (hand.model, hand.pool):
            assert torch.equal(logits_of(hand, ids), expected), f"{degree} ranks"
        assert torch.equal(hand.pool.bytes, whole.pool.bytes), "KV"
        experts = hand.model.layers[-1].experts
        assert [part is None for part in experts.down] == [
            index not in experts.own for index in range(len(experts.down))
        ]
        assert len(experts.own) * degree == len(experts.down)


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "fp8", "int4-g32"])
def test_quantized_weights(tmp_path, quantization):
    make_folder(tmp_path, "llama3", hidden_size=256, head_dim=64, intermediate_size=512)
    config = EngineConfig(tmp_path, dtype="bf16", quantization=quantization)
    whole = Hand(load_model(config), form="bf16")
    ids = random_ids(40, 1)
    expected, hand = whole.step({"a": ids})["a"], Hand(whole.model, form="bf16")
    with ranked(config, 2, hand.pool) as (hand.model, hand.pool):
        assert torch.equal(hand.step({"a": ids})["a"], expected)


def test_weights_whose_inputs_are_stored_in_another_order(tmp_path):
    """A rank asks the others for the inputs that its part of the weight names."""
    dense_folder(tmp_path, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, intermediate_size=512)
    write_gptq(tmp_path, act_order=True)
    for options in ({"dtype": "bf16"}, {"dtype": "fp32", "linear": "dense"}):
        config, ids = EngineConfig(tmp_path, **options), random_ids(40, 1)
        whole = Hand(load_model(config), form=config.dtype)
        expected = whole.step({"a": ids})["a"]
        for degree in (2, 4):
            hand = Hand(whole.model, form=config.dtype)
            with ranked(config, degree, hand.pool) as (hand.model, hand.pool):
                assert torch.equal(hand.step({"a": ids})["a"], expected)


@pytest.mark.parametrize("name", ["llama-mqa-bias", "olmo2", "qwen3-moe"])
def test_layers_that_torch_runs(tmp_path, name):
    make_folder(tmp_path, name, **{"qwen3-moe": {"moe_intermediate_size": 64}}.get(name, {"head_dim": 16}))
    config, ids = EngineConfig(tmp_path, dtype="fp32", linear="dense"), random_ids(76, 1)
    whole = Hand(load_model(config), form="fp32")
    expected = logits_of(whole, ids)
    for degree in (2, 4):
        hand = Hand(whole.model, form="fp32")
        with ranked(config, degree, hand.pool) as (hand.model, hand.pool):
            assert torch.equal(logits_of(hand, ids), expected), f"{degree} ranks"
        assert torch.equal(hand.pool.bytes, whole.pool.bytes), "KV"
