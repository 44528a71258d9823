"""Scores are those of the model that transformers reads."""

import math

import pytest
import torch
import torch.nn.functional as F

from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from baton.quantization import scoring
from tests.support.model_folders.families import make_folder, random_ids


@pytest.mark.parametrize("family", ["llama3", "qwen3-next", "granite-4", "mamba2"])
def test_bits_of_two_texts(family, tmp_path, monkeypatch):
    """Each in several steps, which a state crosses; the second text begins anew."""
    monkeypatch.setattr(scoring, "CHUNK", 24)
    reference = make_folder(tmp_path, family)
    texts = [random_ids(60, 1), random_ids(50, 2)]
    found = scoring.score(load_model(EngineConfig(tmp_path)), "fp32", texts, num_bytes=100)
    with torch.inference_mode():
        logits = [reference(torch.tensor([ids[:-1]])).logits[0] for ids in texts]
    nats = sum(F.cross_entropy(rows, torch.tensor(ids[1:]), reduction="sum").item() for rows, ids in zip(logits, texts))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / 100, rel=1e-3)
    assert torch.equal(found.choices, torch.cat(logits).argmax(dim=1))
