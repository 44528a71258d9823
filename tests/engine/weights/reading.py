"""What a folder's weights are read as, and what its model says."""

import torch

from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.weights.formats.registry import open_source
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.families import random_ids

IDS = random_ids(40, 1)


def read_all(folder, meanings, dtype=torch.float32) -> dict:
    """Every module that has a meaning, as its folder's format reads it."""
    spec = read_spec(folder)
    source = open_source(folder, "auto", dtype, spec.num_heads, spec.num_kv_heads)
    return {module: source.linear(module, *value.shape) for module, value in meanings.items()}


def assert_reads(folder, meanings) -> dict:
    weights = read_all(folder, meanings)
    for module, weight in weights.items():
        scale = meanings[module].abs().max().item()
        torch.testing.assert_close(weight.dequantize(), meanings[module], atol=2e-6 * scale, rtol=1e-6, msg=module)
    return weights


def assert_same_logits(folder, model, meanings, tolerance: float = 1e-3):
    ours = ManualBatch(load_model(EngineConfig(folder, dtype="fp32", linear="dense"))).step({"a": IDS})["a"]
    with torch.inference_mode():
        theirs = quantized_folders.with_meanings(model, meanings)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance * theirs.abs().max().item(), rtol=0)
