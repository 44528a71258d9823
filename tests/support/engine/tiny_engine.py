"""An engine of a tiny random Llama, and prompts for it."""

import random

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine

TINY_VOCAB = 256


def load_tiny(folder, **options) -> Engine:
    defaults = dict(block_size=16, num_blocks=128, max_num_seqs=6, max_num_batched_tokens=200, threads=1)
    return Engine.load(EngineConfig(model=folder, **(defaults | options)))


def tiny_prompt(num_tokens: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + index).randrange(TINY_VOCAB) for index in range(num_tokens)]
