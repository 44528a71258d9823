"""Ranks on GPUs against one GPU, and what is said where GPUs do not fit."""

import pytest
import torch
from torch import distributed

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.gpu_ranks.build import devices_for, load_on_gpus
from tests.support import bare_engine
from tests.support.model_folders.families import make_folder, random_ids


def config_of(folder, degree: int, **options) -> EngineConfig:
    defaults = dict(gpu_memory_utilization=0.4, max_num_seqs=8, max_model_len=256, max_num_batched_tokens=128)
    return EngineConfig(folder, **(defaults | {"tensor_parallel": degree} | options))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("options", [{}, {"speculator": "ngram"}, {"kv_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("ranks", ["tensor_parallel", "pipeline_parallel"])
def test_tokens_of_one_gpu(tmp_path, options, ranks):
    make_folder(tmp_path, "llama3", torch.bfloat16, head_dim=64)
    prompts = [random_ids(length, length) for length in (3, 17, 64, 150)]
    requests = [
        bare_engine.bare_request(str(i), ids, max_tokens=24, temperature=0.8, seed=7) for i, ids in enumerate(prompts)
    ]
    found = []
    for degree in (1, 2):
        config = config_of(tmp_path, 1, device="cuda", dtype="bf16", **options, **({ranks: 2} if degree > 1 else {}))
        engine = Engine.load(config)
        assert engine.runner.launcher.num_graphs > 0
        answers = bare_engine.serve_alone(engine, requests)
        found.append(([answers[str(i)][0].token_ids for i in range(len(prompts))], engine.numerics_class))
        if engine.ranks is not None:
            engine.ranks.close()
    assert found[0] == found[1]


def test_gpus_that_do_not_fit(monkeypatch, tmp_path):
    """Too few, without NCCL, of two kinds."""
    config = config_of(tmp_path, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"^tensor_parallel 2: each rank needs a GPU, and 1 can be seen; show more"):
        devices_for(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match=r"^tensor_parallel 2: torch .* has no NCCL; install one that has it$"):
        devices_for(config)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H{index}00")
    with pytest.raises(
        ValueError, match="^tensor_parallel 2: GPU 0 is H000, GPU 1 is H100: give ranks GPUs of a kind$"
    ):
        devices_for(config)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    assert devices_for(config) == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel": 2}, "a stage on a GPU has one rank"),
        ({"tensor_parallel": 1, "pipeline_parallel": 2, "remote_stages": 1}, "stages of other hosts compute on CPUs"),
        ({"sm_share": 0.5}, "sm_share: ranks have their GPUs alone"),
        ({"all_reduce": "fast"}, "all_reduce fast adds in an order that the size of a step changes"),
        ({"expert_parallel": True}, "expert_parallel has no effect on a model without experts"),
    ],
    ids=str,
)
def test_what_ranks_on_gpus_cannot_do(tmp_path, options, message):
    make_folder(tmp_path, "llama3", head_dim=16, num_hidden_layers=1)
    option = "pipeline_parallel" if "pipeline_parallel" in options else "tensor_parallel"
    with pytest.raises(ValueError, match=f"^{option} 2: {message}"):
        load_on_gpus(config_of(tmp_path, 2, **options))


def test_stages_on_gpus_have_layers_that_see_all(tmp_path):
    make_folder(tmp_path, "gemma2", head_dim=16)
    with pytest.raises(ValueError, match="^pipeline_parallel 2: stages on GPUs have models whose layers all see all"):
        load_on_gpus(config_of(tmp_path, 1, pipeline_parallel=2))
