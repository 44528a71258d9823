"""Our Llama is transformers' Llama, before and after export, with and without a cache."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.training.data.tokenizer import train_tokenizer
from baton.training.model.export import export, load
from baton.training.model.llama import Llama, ModelConfig
from baton.training.model.mixture import Mixture, MixtureConfig

CONFIG = ModelConfig(300, 48, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_length=64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for parameter in model.parameters():  # away from the zero matrices training starts from
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    export(model, train_tokenizer(["x = 1\n" * 50], 300), folder)
    return folder


@pytest.fixture
def token_ids():
    return torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_transformers_computes_the_same_logits(model, folder, token_ids):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert theirs.generation_config.do_sample is False
    assert sum(p.numel() for p in theirs.parameters()) == model.num_parameters()
    torch.testing.assert_close(theirs(token_ids).logits, model(token_ids), rtol=1e-4, atol=1e-4)


def test_an_exported_model_loads_unchanged(model, folder):
    loaded = load(folder)
    assert loaded.config == CONFIG
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@torch.inference_mode()
def test_the_cache_changes_nothing(model, token_ids):
    cache = model.new_cache()
    parts = [model(token_ids[:, :30], cache)]
    parts += [model(token_ids[:, i : i + 1], cache) for i in range(30, 40)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(token_ids), rtol=1e-4, atol=1e-4)


def test_export_leaves_only_finished_files(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@torch.inference_mode()
def test_a_mixture_is_transformers_mixture(tmp_path, token_ids):
    torch.manual_seed(0)
    model = Mixture(MixtureConfig(300, 48, 32, 2, 4, 2, 16, max_length=64, num_experts=4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.data = parameter.data.bfloat16().float()
    export(model.eval(), train_tokenizer(["x = 1\n" * 50], 300), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(theirs(token_ids).logits, model(token_ids), rtol=1e-4, atol=1e-4)
    loaded = load(tmp_path)
    assert torch.equal(loaded(token_ids), model(token_ids)) and 1 <= float(model.balance) <= 4
