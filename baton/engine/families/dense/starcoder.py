"""StarCoder2: layer norms, linears with biases, an MLP without a gate."""

from baton.engine.core.model_spec import ModelSpec, NormSpec, TensorNames
from baton.engine.families.config import Config

NAMES = TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def starcoder2(config: Config) -> ModelSpec:
    bias = config.flag("use_bias", True)
    return config.spec(
        "starcoder2", [config.rope(4096)], config.same_layers(config.window()), num_kv_heads=2, tied=True,
        norm=NormSpec(config.number("norm_epsilon", 1e-5), "layer", bias=True), names=NAMES, gated=False,
        activation=config.activation(default="gelu_pytorch_tanh"), qkv_bias=bias, output_bias=bias, mlp_bias=bias,
    )  # fmt: skip
