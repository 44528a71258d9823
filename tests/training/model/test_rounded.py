"""Training for int4: what is trained is what the folder holds."""

import pytest
import torch

from baton.engine.weights.formats.registry import open_source
from baton.training.data.tokenizer import train_tokenizer
from baton.training.model.llama import Llama, ModelConfig
from baton.training.model.rounded import export_rounded, round_weights

CONFIG = ModelConfig(300, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_length=64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for parameter in model.parameters():  # away from the zero matrices training starts from
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_the_folder_has_the_weights_that_were_trained(model, tmp_path):
    round_weights(model)
    trained = {
        name: module.weight.detach().clone() for name, module in model.named_modules() if hasattr(module, "in_features")
    }
    assert len(trained) == 14
    export_rounded(model, train_tokenizer(["x = 1\n" * 50], 300), tmp_path / "float", tmp_path / "int4")
    source = open_source(tmp_path / "int4", "auto", torch.bfloat16, 4, 2)
    for name, weight in trained.items():
        stored = source.linear(name, *weight.shape)
        assert (stored.bits, stored.group) == (4, 32)
        torch.testing.assert_close(stored.dequantize(), weight, rtol=1e-6, atol=1e-6)


def test_float_weights_learn_through_the_rounding(model):
    """Steps that are too small to change an integer add up."""
    round_weights(model)
    ids = torch.randint(0, 300, (1, 17), generator=torch.Generator().manual_seed(1))
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
    loss.backward()
    layer = model.model.layers[0].mlp.down_proj
    learned = layer.parametrizations.weight.original
    assert learned.grad is not None and learned.grad.abs().sum() > 0
    assert not torch.equal(layer.weight, learned) and len(layer.weight[0, :32].unique()) <= 16
