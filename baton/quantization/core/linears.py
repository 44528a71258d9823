"""Find the linears of any family's layers, by what the family's own reader asks for. Everything that it reads otherwise
stays unquantized: routers, weights absorbed by latent attention, convolutions, recurrences."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.engine.core.model_spec import ModelSpec
from baton.engine.layers.linear import LinearKernel
from baton.engine.models.linears import Linears
from baton.engine.models.read_layer import read_layer
from baton.engine.parallel.shard import WHOLE
from baton.engine.weights.formats.base import DenseFormat
from baton.engine.weights.tensors import Weights
from baton.quantization.core.errors import QuantizeError


class _Unmade(LinearKernel):
    """Stands in for a kernel; it computes nothing."""

    name, batch_invariant, row_multiple = "none", True, 1

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        raise NotImplementedError("only the shape of this linear was asked for")


class _Asked(Linears):
    """Records the modules that it is asked for, and reads none."""

    def __init__(self, source: DenseFormat):
        super().__init__(source, lambda *of_a_weight: _Unmade())
        self.shapes: dict[str, tuple[int, int]] = {}

    def read(
        self, modules: Sequence[str], sizes: Sequence[int], in_features: int, *how: Any, **else_: Any
    ) -> LinearKernel:
        self.shapes |= {module: (size, in_features) for module, size in zip(modules, sizes, strict=True)}
        return _Unmade()

    def expert(self, name: str, *which: Any, **how: Any) -> LinearKernel:
        raise QuantizeError(f"{name}: experts in one tensor are not quantized; serve the folder with --quantization")


def linear_shapes(spec: ModelSpec, weights: Weights, index: int) -> dict[str, tuple[int, int]]:
    """Return [out, in] of every linear of layer `index` by module name. Raises ModelError if other tensors of the layer
    are missing or differ."""
    source = DenseFormat(weights, torch.float32)
    asked = _Asked(source)
    read_layer(spec, index, source, asked, lambda *of_a_router: _Unmade(), WHOLE)
    return asked.shapes
