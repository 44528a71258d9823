"""Hold the modules of one decoder layer."""

from dataclasses import dataclass

from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; q, k, v are one product, gate and up another."""

    input_norm: RMSNorm
    qkv: LinearKernel
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: LinearKernel
    mlp_norm: RMSNorm
    gate_up: LinearKernel
    down: LinearKernel
