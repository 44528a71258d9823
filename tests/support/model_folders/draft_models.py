"""A tiny random model, and a draft that often agrees with it: its own weights with some noise."""

import random
from pathlib import Path

import torch

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Request
from baton.engine.engine import Engine
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import tiny

DRAFT_VOCAB = 64


def make_target_and_draft(path: Path, noise: float = 0.02) -> tuple[Path, Path]:
    """Return (target, draft)."""
    model = tiny(DRAFT_VOCAB)
    model.save_pretrained(path / "target")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.abs().mean() * torch.randn_like(parameter)
    model.save_pretrained(path / "draft")
    return path / "target", path / "draft"


def load_draftable(folder: Path, proposers=None, **options) -> Engine:
    defaults = dict(block_size=16, num_blocks=512, max_num_seqs=32, max_num_batched_tokens=512, threads=1)
    return Engine.load(EngineConfig(model=folder, **(defaults | options)), proposers=proposers)


SAMPLING = (
    dict(),
    dict(temperature=1.0),
    dict(temperature=0.8, top_k=12),
    dict(temperature=1.1, top_p=0.8, min_p=0.02),
    dict(temperature=0.7, top_k=30, top_p=0.95, repetition_penalty=1.2),
    dict(repetition_penalty=1.3, frequency_penalty=0.4),
    dict(temperature=0.9, presence_penalty=0.5, frequency_penalty=0.2),
    dict(logit_bias=((3, 1.5), (7, -2.0)), logprobs=2),
    dict(temperature=1.0, logprobs=0, n=2),
    dict(temperature=0.6, min_p=0.1, logprobs=3),
)


def mixed_requests(count: int, max_tokens: int = 24, seed: int = 0, **more) -> list[Request]:
    """Return requests with every sampling field, prompts of all lengths, many with a prefix in common, some that
    repeat."""
    chance = random.Random(seed)
    shared, requests = [chance.randrange(DRAFT_VOCAB) for _ in range(150)], []
    for index in range(count):
        tokens = shared[: chance.choice([0, 0, 64, 130])]
        tokens += [chance.randrange(DRAFT_VOCAB) for _ in range(chance.randint(1, 90))]
        if chance.random() < 0.3:
            tokens += tokens[-12:] * 2
        options = dict(SAMPLING[index % len(SAMPLING)], seed=index)
        if chance.random() < 0.3:
            options["stop_token_ids"] = frozenset(chance.sample(range(DRAFT_VOCAB), 2))
            options["min_tokens"] = chance.choice([0, 3, 9])
        request = engine_request(f"r{seed}-{index}", tokens, chance.randint(1, max_tokens), **(options | more))
        requests.append(request)
    return requests
