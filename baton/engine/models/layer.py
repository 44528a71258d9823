"""Hold the modules of one decoder layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.norm import Norm
from baton.engine.models.experts import Experts
from baton.engine.recurrent.mixer import Mixer

if TYPE_CHECKING:
    from baton.engine.recurrent.gpu import GpuMixer


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; q, k, v are one product, gate and up another. None: the layer has no such norm."""

    input_norm: Norm | None
    qkv: LinearKernel | None  # None: no attention
    q_norm: Norm | None
    k_norm: Norm | None
    output: LinearKernel | None
    mlp_norm: Norm | None
    gate_up: LinearKernel | None  # None: experts, or no MLP
    down: LinearKernel | None
    attention_out_norm: Norm | None = None  # of what attention adds to the rows
    mlp_out_norm: Norm | None = None
    experts: Experts | None = None
    state: "Mixer | GpuMixer | None" = None  # what mixes tokens in place of attention; where there are both, beside it

    @property
    def has_mlp(self) -> bool:
        """Return whether something follows what mixes tokens."""
        return self.experts is not None or self.gate_up is not None
