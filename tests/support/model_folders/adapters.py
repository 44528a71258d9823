"""Engines with LoRA adapters: which modules a family has, and how they are loaded."""

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from tests.support.model_folders.families import random_ids

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
PHI = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# What each kind of layer has of its own: turned and merged tensors, biases, halves side by side, experts.
TARGETS = {
    "llama3": ATTENTION + MLP,
    "glm4": [*ATTENTION, "gate_up_proj", "down_proj"],
    "phi3": PHI,
    "command-r": ATTENTION + MLP,
    "starcoder2": [*ATTENTION, "c_fc", "c_proj"],
    "gemma3": ["q_proj", "v_proj", "down_proj"],
    "qwen3-moe": ATTENTION,
}
PROMPT = random_ids(70, 1)


def load_with_adapters(folder, *adapters, **options) -> Engine:
    defaults = dict(block_size=16, num_blocks=96, max_num_seqs=6, max_num_batched_tokens=90, threads=1)
    given = tuple(f"{path.name}={path}" for path in adapters)
    return Engine.load(EngineConfig(folder, adapter=given, **(defaults | options)))


def identities(engine: Engine) -> dict[str, bytes]:
    return engine.adapters.listed()
