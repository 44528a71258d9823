"""What a model on a device has, it has there."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import Memory
from baton.engine.models.loader import load_model
from tests.support.model_folders.families import make_folder

META = torch.device("meta")


def tensors_of(part, path: str, seen: set[int]) -> dict[str, Tensor]:
    """All tensors that can be reached from an object of a model, by where they are."""
    if isinstance(part, Tensor):
        return {path: part} if part.numel() else {}
    if id(part) in seen:
        return {}
    seen.add(id(part))
    if isinstance(part, list | tuple):
        inner = enumerate(part)
    elif isinstance(part, dict):
        inner = part.items()
    elif type(part).__module__.startswith("baton."):
        names = (*getattr(part, "__dict__", ()), *getattr(type(part), "__slots__", ()))
        inner = [(name, getattr(part, name)) for name in names if hasattr(part, name)]
    else:
        return {}
    return {name: found for key, value in inner for name, found in tensors_of(value, f"{path}.{key}", seen).items()}


@pytest.mark.skipif(bool(kernels.unavailable("meta")), reason=kernels.unavailable("meta") or "there")
@pytest.mark.parametrize("name", ["llama4", "gpt-oss", "deepseek-v3", "olmo3", "command-r7b"])
def test_all_tensors_of_a_model_are_on_its_device(tmp_path, monkeypatch, name):
    make_folder(tmp_path, name)
    monkeypatch.setattr(Memory, "of", lambda device: Memory(1 << 30, 1 << 30, 0))
    config = EngineConfig(tmp_path, attention="reference", batch_invariant=False, max_model_len=64)
    found = tensors_of(load_model(config, META), name, set())
    assert len(found) > 10
    assert not {path for path, tensor in found.items() if tensor.device != META}
