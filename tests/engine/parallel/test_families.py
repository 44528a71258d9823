"""Families on 2 and 4 ranks: the logits of transformers within 1e-4, and in fp32 and bf16 the bits of one rank."""

import pytest
import torch

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from tests.support.engine.folders import SMALL, Hand, make_folder, random_ids
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


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "fp8", "int4-g32"])
def test_quantized_weights(tmp_path, quantization):
    make_folder(tmp_path, "llama3", hidden_size=256, head_dim=64, intermediate_size=512)
    config = EngineConfig(tmp_path, dtype="bf16", quantization=quantization)
    whole = Hand(load_model(config), form="bf16")
    ids = random_ids(40, 1)
    expected, hand = whole.step({"a": ids})["a"], Hand(whole.model, form="bf16")
    with ranked(config, 2, hand.pool) as (hand.model, hand.pool):
        assert torch.equal(hand.step({"a": ids})["a"], expected)
