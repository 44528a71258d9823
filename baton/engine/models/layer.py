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
    """Hold one decoder layer; q, k, v are one product, gate and up another. A norm that the layer lacks is None."""

    input_norm: Norm | None
    qkv: LinearKernel | None  # None: no attention
    q_norm: Norm | None
    k_norm: Norm | None
    output: LinearKernel | None
    mlp_norm: Norm | None
    gate_up: LinearKernel | None  # None: experts, or no MLP
    down: LinearKernel | None
    attention_out_norm: Norm | None = None  # of attention's output, before it is added to the rows
    mlp_out_norm: Norm | None = None
    experts: Experts | None = None
    state: "Mixer | GpuMixer | None" = None  # mixes tokens instead of attention, or beside it if there are both

    @property
    def has_mlp(self) -> bool:
        """Return whether the layer has an MLP or experts."""
        return self.experts is not None or self.gate_up is not None
