"""What a model on a device has, it has there."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels, native
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import Memory
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import num_bytes_for
from baton.engine.parallel.distributed import DistributedCollectives, StageCollectives
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.stage import PipelineStage, cut_layers
from tests.support.model_folders import quantized_folders
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


def load_beside(folder, degree: int, stage: PipelineStage | None = None, **options):
    """Load the last of so many ranks, or a stage, of a GPU with room for 0.7 of the files' bytes."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = EngineConfig(
        folder, batch_invariant=False, max_model_len=64, attention="reference", gpu_memory_utilization=0.7, **options
    )
    shard, memory = Shard(degree - 1, degree), memoryview(bytearray(num_bytes_for(degree)))
    kind = DistributedCollectives if stage is None else StageCollectives
    collectives = kind(memory, shard, None, META, fast=True) if degree > 1 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "of", lambda device: Memory(size, size, 0))
        if stage is None:
            return load_model(config, META, collectives)
        return load_model(config, META, stage=stage, stages=collectives)


@pytest.mark.skipif(bool(kernels.unavailable("meta")), reason=kernels.unavailable("meta") or "there")
@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
def test_a_rank_or_a_stage_of_a_model_that_does_not_fit_on_one_gpu(tmp_path):
    make_folder(tmp_path, "llama3", torch.bfloat16, head_dim=64, num_hidden_layers=4)
    with pytest.raises(ValueError, match="the model's weights take"):
        load_beside(tmp_path, 1)
    load_beside(tmp_path, 2)
    for stage in cut_layers(read_spec(tmp_path), 2):
        load_beside(tmp_path, 2, stage)
    quantized_folders.write_fp8(tmp_path, spread="row")
    with pytest.raises(ValueError, match="the model's weights take"):
        load_beside(tmp_path, 1)
    load_beside(tmp_path, 2)


@pytest.mark.skipif(bool(kernels.unavailable("meta")), reason=kernels.unavailable("meta") or "there")
def test_a_model_that_fits_in_the_dtype_that_it_is_read_in(tmp_path):
    make_folder(tmp_path, "llama3", torch.float32)
    with pytest.raises(ValueError, match="the model's weights take"):
        load_beside(tmp_path, 1, dtype="fp32")
    load_beside(tmp_path, 1, dtype="bf16")
