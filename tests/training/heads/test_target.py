"""The frozen target says what transformers' model does, of every sequence of a batch by itself."""

from dataclasses import replace

import pytest
import torch

from baton.engine.execute import build
from baton.engine.layers.activation import soft_capped
from baton.training.data.corpus import Document
from baton.training.data.tokenizer import train_tokenizer
from baton.training.heads.heads import heads_loss, new_heads, train_heads
from baton.training.heads.target import FrozenTarget
from baton.training.model.export import export
from baton.training.model.llama import Llama
from tests.support.model_folders.families import make_folder, random_ids
from tests.support.model_folders.learned_model import SHAPE, TEXT


@pytest.mark.parametrize("family", ["llama3", "qwen3-next", "bamba"])
def test_logits_of_a_batch(family, tmp_path):
    reference = make_folder(tmp_path, family)
    target = FrozenTarget(tmp_path, max_length=64, max_tokens=192)
    token_ids = torch.tensor([random_ids(50, seed) for seed in range(3)])
    for _ in range(2):  # nothing is left of the batch before
        logits = target.logits(target.features(token_ids)).float()
        with torch.inference_mode():
            torch.testing.assert_close(
                logits, reference(token_ids).logits, atol=0.05 * logits.abs().max().item(), rtol=0
            )


@pytest.mark.parametrize("numbers", [{"logit_scale": 0.25}, {"logit_scale": 4.0, "logit_softcap": 1.5}])
def test_logits_are_scaled_and_capped_as_the_models_are(numbers, tmp_path):
    """Of Granite, Cohere and Falcon-H1, and of Gemma 2: heads had learned from sharper distributions than the model
    draws from."""
    export(Llama(SHAPE), train_tokenizer([TEXT], SHAPE.vocab_size), tmp_path)
    target = FrozenTarget(tmp_path, max_length=64, max_tokens=128)
    target.spec = replace(target.spec, **numbers)
    features = target.features(torch.tensor([random_ids(50, seed) for seed in range(2)]))
    wanted = target.model.scored(features.flatten(0, 1)).float() * target.spec.logit_scale
    if (cap := target.spec.logit_softcap) is not None:
        wanted = soft_capped(wanted, cap)
    logits = target.logits(features).float().flatten(0, 1)
    torch.testing.assert_close(logits, wanted, atol=0.05 * wanted.abs().max().item(), rtol=0)
    assert torch.equal(target.distribution(features).flatten(0, 1), logits.softmax(dim=-1))


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_of_a_model_with_states_learn(kind, tmp_path):
    make_folder(tmp_path, "qwen3-next")
    target = FrozenTarget(tmp_path, max_length=64, max_tokens=128)
    token_ids = torch.tensor([random_ids(64, seed) for seed in range(2)])
    heads = new_heads(target, kind)
    heads_loss(heads, target)(token_ids, token_ids.roll(-1, 1)).backward()
    assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in heads.parameters())


def test_the_target_is_read_on_the_cpu(tmp_path, monkeypatch):
    """What asks it is code for the CPU: on a GPU, which `auto` takes, its first product had failed."""
    make_folder(tmp_path, "llama3")
    asked = []
    monkeypatch.setattr(build, "find_device", lambda name: asked.append(name) or torch.device("cpu"))
    FrozenTarget(tmp_path, max_length=64, max_tokens=128)
    assert asked == ["cpu"]


def test_an_eagle_draft_needs_rope(tmp_path):
    make_folder(tmp_path, "granite-4")
    with pytest.raises(ValueError, match="turns by the model's rope, and it has none; train --kind medusa"):
        train_heads("eagle", tmp_path, [Document("a", "text")], tmp_path / "out", 1.0)
