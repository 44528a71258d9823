"""The frozen target says what transformers' model does, of every sequence of a batch by itself."""

import pytest
import torch

from baton.training.data.corpus import Document
from baton.training.heads.heads import heads_loss, new_heads, train_heads
from baton.training.heads.target import FrozenTarget
from tests.support.engine.folders import make_folder, random_ids


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


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_of_a_model_with_states_learn(kind, tmp_path):
    make_folder(tmp_path, "qwen3-next")
    target = FrozenTarget(tmp_path, max_length=64, max_tokens=128)
    token_ids = torch.tensor([random_ids(64, seed) for seed in range(2)])
    heads = new_heads(target, kind)
    heads_loss(heads, target)(token_ids, token_ids.roll(-1, 1)).backward()
    assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in heads.parameters())


def test_an_eagle_draft_needs_rope(tmp_path):
    make_folder(tmp_path, "granite-4")
    with pytest.raises(ValueError, match="turns by the model's rope, and it has none; train --kind medusa"):
        train_heads("eagle", tmp_path, [Document("a", "text")], tmp_path / "out", 1.0)
