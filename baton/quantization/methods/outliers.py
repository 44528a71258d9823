"""LLM.int8 (Dettmers et al., arXiv 2208.07339): keep the few input channels that would spoil the int8 scale of every
row in bf16. The paper finds them while it runs; here the calibration set determines them once."""

import torch
from torch import Tensor

from baton.engine.weights.forms import Outliers
from baton.quantization.core.block import Stage

THRESHOLD = 6.0  # the paper's threshold for inputs of unit size, here times the root mean square of the layer's inputs
# of the inputs: after SwiGLU most channels exceed the threshold at some token, and bf16 has no advantage then
MAX_SHARE = 1 / 32


def find(stage: Stage) -> Tensor:
    """Return the columns whose inputs exceed the threshold, int64 [C], ascending; if they are too many, those with the
    largest inputs."""
    largest = stage.largest()
    mean_square = sum(x.square().sum().item() for x in stage.inputs) / sum(x.numel() for x in stage.inputs)
    limit = THRESHOLD * mean_square**0.5
    columns = torch.argsort(largest, descending=True)[: max(1, int(MAX_SHARE * len(largest)))]
    return columns[largest[columns] > limit].sort().values


def split(weight: Tensor, columns: Tensor) -> tuple[Tensor, Outliers | None]:
    """Return a weight fp32 [out, in] with its outlier columns zeroed, and these columns."""
    if not len(columns):
        return weight, None
    rest = weight.clone()
    rest[:, columns] = 0
    return rest, Outliers(columns, weight[:, columns].to(torch.bfloat16))
