"""Families on 2 and 4 ranks: the logits of transformers within 1e-4, and in fp32 and bf16 the bits of one rank."""

from dataclasses import replace

import pytest
import torch

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import FAMILIES, LONGROPE, SMALL, THETA, make_folder, random_ids
from tests.support.model_folders.quantized_folders import dense_folder, write_gptq
from tests.support.native.ranks_in_threads import ranked

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
TOLERANCE = 1e-4
ROOM = {"hidden_size": 64, "head_dim": 16}  # of which every rank of 4 gets whole vectors
MOE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
WIDE = {"hidden_size": 64}  # heads follow from it
LONG_HEAD = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0]
# What differs from ROOM, or stands in its place, so that 4 ranks divide heads and inputs.
CHANGES = {
    "llama-head-dim": {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4},
    "llama-longrope": {"rope_parameters": THETA | LONGROPE | {"short_factor": LONG_HEAD, "long_factor": LONG_HEAD}},
    "qwen3-tied": {"head_dim": 32},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen2-moe": MOE,
    "qwen3-moe": MOE,
    "nemotron-3-latent": {"moe_latent_size": 32},
    "qwen3-next": MOE,
    "qwen3.5-moe": MOE,
} | {name: {"v_head_dim": 16} for name in ("deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "kimi-k2")}
# Of each way in which something is cut one: KV heads that several ranks have and biases behind sums, a head that is the
# embedding, projections that one tensor holds, norms over all heads, attention beside the MLP, experts, latent
# attention; of states a norm that all ranks share, groups of heads that several have without one, heads of keys and
# Mamba's channels.
ORDINARY = ("llama-mqa-bias", "llama3.2-tied", "phi3", "olmo2", "command-r", "qwen2-moe", "deepseek-v3")
ORDINARY += ("granite-4", "falcon-h1", "qwen3-next", "jamba")


def changes_of(name: str) -> dict:
    prefix, differences = FAMILIES[name]
    room = WIDE if prefix.startswith("Deepseek") or "head_dim" in differences else ROOM
    return room | CHANGES.get(name, {})


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(hand: ManualBatch, ids: list[int]) -> torch.Tensor:
    """A chunk, another one behind it, then single tokens beside a second sequence."""
    found = [hand.step({"a": ids[:30]})["a"], hand.step({"a": ids[30:70], "b": ids[:9]})["a"]]
    return torch.cat([*found, *(hand.step({"a": [token], "b": [token]})["a"] for token in ids[70:])])


@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_ranks_have_the_bits_of_one(tmp_path, name):
    reference = make_folder(tmp_path, name, **changes_of(name))
    ids = random_ids(76, 1)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0]
    for dtype in ("fp32", "bf16"):
        config = EngineConfig(tmp_path, dtype=dtype)
        whole = ManualBatch(load_model(config), form=dtype)
        expected = logits_of(whole, ids)
        for degree in (2, 4):
            hand = ManualBatch(whole.model, form=dtype)
            with ranked(config, degree, hand.pool) as (hand.model, hand.pool):
                found = logits_of(hand, ids)
            assert torch.equal(found, expected), f"{degree} ranks in {dtype}"
            assert torch.equal(hand.pool.bytes, whole.pool.bytes), "KV"
            assert hand.states() == whole.states()
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
    whole = ManualBatch(load_model(config), form="bf16")
    expected = logits_of(whole, ids)
    for degree in (2, 4):
        hand, options = ManualBatch(whole.model, form="bf16"), {"tensor_parallel": degree, "expert_parallel": True}
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
    whole = ManualBatch(load_model(config), form="bf16")
    ids = random_ids(40, 1)
    expected, hand = whole.step({"a": ids})["a"], ManualBatch(whole.model, form="bf16")
    with ranked(config, 2, hand.pool) as (hand.model, hand.pool):
        assert torch.equal(hand.step({"a": ids})["a"], expected)


def test_weights_whose_inputs_are_stored_in_another_order(tmp_path):
    """A rank asks the others for the inputs that its part of the weight names."""
    dense_folder(tmp_path, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, intermediate_size=512)
    write_gptq(tmp_path, act_order=True)
    for options in ({"dtype": "bf16"}, {"dtype": "fp32", "linear": "dense"}):
        config, ids = EngineConfig(tmp_path, **options), random_ids(40, 1)
        whole = ManualBatch(load_model(config), form=config.dtype)
        expected = whole.step({"a": ids})["a"]
        for degree in (2, 4):
            hand = ManualBatch(whole.model, form=config.dtype)
            with ranked(config, degree, hand.pool) as (hand.model, hand.pool):
                assert torch.equal(hand.step({"a": ids})["a"], expected)


@pytest.mark.parametrize("name", ["llama-mqa-bias", "olmo2", "qwen3-moe"])
def test_layers_that_torch_runs(tmp_path, name):
    make_folder(tmp_path, name, **{"qwen3-moe": {"moe_intermediate_size": 64}}.get(name, {"head_dim": 16}))
    config, ids = EngineConfig(tmp_path, dtype="fp32", linear="dense"), random_ids(76, 1)
    whole = ManualBatch(load_model(config), form="fp32")
    expected = logits_of(whole, ids)
    for degree in (2, 4):
        hand = ManualBatch(whole.model, form="fp32")
        with ranked(config, degree, hand.pool) as (hand.model, hand.pool):
            assert torch.equal(logits_of(hand, ids), expected), f"{degree} ranks"
        assert torch.equal(hand.pool.bytes, whole.pool.bytes), "KV"


@pytest.mark.parametrize(
    ("name", "changes", "whole_experts"),
    [
        ("llama-mqa-bias", {"head_dim": 16}, False),
        ("qwen2-moe", MOE | WIDE | {"num_experts": 8}, False),
        ("qwen2-moe", MOE | WIDE | {"num_experts": 8}, True),
        ("gpt-oss", WIDE | {"num_local_experts": 8}, True),
        ("deepseek-v3", WIDE | {"v_head_dim": 16}, False),
        ("granite-4", {}, False),
    ],
)
def test_fast_sums_are_near_and_a_class_of_their_own(tmp_path, name, changes, whole_experts):
    """The logits of transformers; a row has the same bits whatever shares its step."""
    reference = make_folder(tmp_path, name, **changes)
    ids = random_ids(76, 1)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0]
    config = EngineConfig(tmp_path, dtype="fp32")
    whole = ManualBatch(load_model(config))
    options = {"all_reduce": "fast", "expert_parallel": whole_experts}
    for degree in (2, 4):
        hand = ManualBatch(whole.model)
        with ranked(replace(config, tensor_parallel=degree, **options), degree, hand.pool) as (hand.model, hand.pool):
            found = logits_of(hand, ids)
            again = hand.step({"c": ids})["c"]
        torch.testing.assert_close(again, theirs, atol=TOLERANCE, rtol=0)
        assert torch.equal(found[:30], again[:30]), "another batch, other bits"
        assert f"ranks{degree}" in hand.model.numerics and not any("tree" in word for word in hand.model.numerics)


def test_fast_sums_of_quantized_rows(tmp_path):
    """A rank scales its own inputs: other bits than the exact sums, and not far from them."""
    make_folder(tmp_path, "llama3", hidden_size=256, head_dim=64, intermediate_size=512)
    config, ids = EngineConfig(tmp_path, dtype="bf16", quantization="int8"), random_ids(40, 1)
    whole = ManualBatch(load_model(config), form="bf16")
    expected, hand = whole.step({"a": ids})["a"], ManualBatch(whole.model, form="bf16")
    with ranked(replace(config, tensor_parallel=2, all_reduce="fast"), 2, hand.pool) as (hand.model, hand.pool):
        found = hand.step({"a": ids})["a"]
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()
