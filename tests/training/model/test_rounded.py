"""Training for int4: what is trained is what the folder holds."""

from pathlib import Path

import pytest
import torch

from baton.engine.weights.formats.registry import open_source
from baton.training.data.tokenizer import train_tokenizer
from baton.training.model.export import export
from baton.training.model.llama import Llama, ModelConfig
from baton.training.model.rounded import export_rounded, round_weights

CONFIG = ModelConfig(300, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_length=64)
TOKENIZER = train_tokenizer(["x = 1\n" * 50], 300)


@pytest.fixture
def model(tmp_path: Path):
    """Rounded."""
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for parameter in model.parameters():  # away from the zero matrices training starts from
        torch.nn.init.normal_(parameter, std=0.2)
    export(model, TOKENIZER, tmp_path / "target")
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(0, 300, (32,), generator=generator) for _ in range(4)]
    round_weights(model, tmp_path / "target", samples, tmp_path / "gptq")
    return model


def weights_of(model: Llama) -> dict[str, torch.Tensor]:
    modules = model.named_modules()
    return {name: module.weight.detach().clone() for name, module in modules if isinstance(module, torch.nn.Linear)}


def take_step(model: Llama) -> None:
    """Move weights and scales by what a gradient says, far enough to change integers."""
    ids = torch.randint(0, 300, (1, 17), generator=torch.Generator().manual_seed(2))
    torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:]).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.02 * parameter.grad.sign()


def assert_stored(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    source = open_source(folder, "auto", torch.bfloat16, 4, 2)
    for name, weight in expected.items():
        stored = source.linear(name, *weight.shape)
        assert (stored.bits, stored.group) == (4, 32)
        torch.testing.assert_close(stored.dequantize(), weight, rtol=1e-6, atol=1e-6)


def test_training_begins_with_the_weights_of_gptq(model, tmp_path):
    weights = weights_of(model)
    assert len(weights) == 14
    assert_stored(tmp_path / "gptq", weights)


def test_the_folder_has_the_weights_that_were_trained(model, tmp_path):
    before = weights_of(model)
    take_step(model)
    trained = weights_of(model)
    export_rounded(model, TOKENIZER, tmp_path / "float", tmp_path / "int4")
    assert_stored(tmp_path / "int4", trained)
    assert all(not torch.equal(trained[name], before[name]) for name in trained)


def test_weights_and_scales_learn_through_the_rounding(model):
    """Steps that are too small to change an integer add up."""
    take_step(model)
    layer = model.model.layers[0].mlp.down_proj
    learned = layer.parametrizations.weight
    assert learned.original.grad.abs().sum() > 0 and learned[0].gain.grad.abs().sum() > 0
    assert not torch.equal(layer.weight, learned.original) and len(layer.weight[0, :32].unique()) <= 16
