"""A dense folder that is rounded to nearest as it is loaded: each tensor is read, rounded and dropped before
the next."""

from collections.abc import Callable

from torch import Tensor

from baton.engine.core.model_errors import ModelError
from baton.engine.weights.formats.base import HEAD, DenseFormat
from baton.engine.weights.forms import Weight
from baton.engine.weights.round import round_asymmetric, round_fp8, round_symmetric

GROUPS = (32, 64, 128)
ROUNDINGS: dict[str, Callable[[Tensor], Weight]] = {
    "int8": lambda weight: round_symmetric(weight, 8, activations="dynamic"),
    "int8-weight-only": lambda weight: round_symmetric(weight, 8),
    "fp8": lambda weight: round_fp8(weight, "dynamic"),
    **{f"int4-g{group}": lambda weight, group=group: round_asymmetric(weight, 4, group) for group in GROUPS},
}


class RoundedFormat(DenseFormat):
    """Read and round a dense folder. `name` is the rounding, a key of ROUNDINGS. The output head has at least 8 bits,
    since errors show there."""

    def __init__(self, tensors, dtype, name: str):
        super().__init__(tensors, dtype)
        self.name = name
        self._round = ROUNDINGS[name]
        self._round_head = ROUNDINGS["int8-weight-only"] if name.startswith("int4") else self._round

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        """Read and round a weight [out_features, in_features]. Raises ModelError if it is missing or cannot be
        rounded."""
        weight = self.weight(module, out_features, in_features)
        return self._rounded(weight, f"{module}.weight", self._round_head if module == HEAD else self._round)

    def expert(
        self, name: str, index: int, count: int, out_features: int, in_features: int, inputs_first: bool = False
    ) -> Weight:
        weight = self.tensors.expert(name, index, (count, out_features, in_features), inputs_first)
        return self._rounded(weight, name, self._round)

    def tied_head(self, embedding, vocab_size: int, hidden_size: int) -> Weight:
        return self._round_head(super().tied_head(embedding, vocab_size, hidden_size).values)

    def _rounded(self, weight: Tensor, name: str, to: Callable[[Tensor], Weight]) -> Weight:
        try:
            return to(weight)
        except ValueError as error:
            raise ModelError(f"{self.tensors.where(name)}: tensor {name}: {error}") from None
