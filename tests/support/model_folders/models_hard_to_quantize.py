"""Small models that are hard to round: correlated inputs and a few channels that dwarf the others."""

from pathlib import Path

import torch

from baton.engine.core.model_spec import ModelSpec
from baton.engine.layers.rope import Rope
from baton.engine.models.loader import Weights
from baton.engine.models.registry import read_spec
from baton.quantization.core.block import Block
from baton.training.model.llama import ModelConfig
from tests.support.model_folders.families import make_folder, random_ids
from tests.support.models import make_model

# Sizes that every group divides.
SMALL = ModelConfig(1024, 128, 256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, max_length=512)
WIDE = dict(hidden_size=192, intermediate_size=256, num_hidden_layers=2)


def make_family(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of a family whose sizes are multiples of 32."""
    make_folder(folder, name, dtype, **WIDE)
    return folder


def make_demo_like(folder: Path) -> Path:
    """Write a model with a tokenizer, bf16, as `baton quantize` finds it."""
    return make_model(folder, SMALL)


def blocks(folder: Path, context: int = 512) -> tuple[ModelSpec, Weights, list[Block]]:
    spec, weights = read_spec(folder), Weights(folder)
    rope = Rope(spec.ropes[0], spec.head_dim, context)
    return spec, weights, [Block(spec, index, weights.read, rope) for index in range(spec.num_layers)]


def samples(count: int = 6, length: int = 64, vocab_size: int = 199) -> list[torch.Tensor]:
    return [torch.tensor(random_ids(length, seed, vocab_size)) for seed in range(count)]


def correlated(num_rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Return inputs [rows, size] that depend on few directions, with a few large channels."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_rows, size // 4, generator=generator) @ torch.randn(size // 4, size, generator=generator)
    channel_sizes = torch.rand(size, generator=generator) + 0.1
    channel_sizes[:: size // 4] = 20
    return mixed * channel_sizes
