"""Models of random weights, with the tokenizer of the shipped model."""

from pathlib import Path

import torch

from baton.training.data.tokenizer import load_tokenizer
from baton.training.model.export import export
from baton.training.model.llama import Llama, ModelConfig
from bench.lib.paths import MODEL

# Layers ten times as large as the shipped model's.
LARGE = ModelConfig(16_384, 1_024, 2_816, num_layers=3, num_heads=16, num_kv_heads=4, head_dim=64)


def write_random_model(folder: Path, config: ModelConfig = LARGE) -> Path:
    """Write a model folder in this shape."""
    torch.manual_seed(0)
    export(Llama(config), load_tokenizer(MODEL), folder)
    return folder
