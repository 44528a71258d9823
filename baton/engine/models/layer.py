"""Hold the modules of one decoder layer."""

from dataclasses import dataclass

from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.norm import Norm
from baton.engine.models.experts import Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; q, k, v are one product, gate and up another. None: the layer has no such norm."""

    input_norm: Norm | None
    qkv: LinearKernel
    q_norm: Norm | None
    k_norm: Norm | None
    output: LinearKernel
    mlp_norm: Norm | None
    gate_up: LinearKernel | None  # None: experts
    down: LinearKernel | None
    attention_out_norm: Norm | None = None  # of what attention adds to the rows
    mlp_out_norm: Norm | None = None
    experts: Experts | None = None
