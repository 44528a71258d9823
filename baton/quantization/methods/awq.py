"""AWQ (Lin et al., arXiv 2306.00978): give inputs with large activations finer steps, by scales that are searched and
folded."""

import torch
from torch import Tensor

from baton.quantization.core.block import Block, Stage
from baton.quantization.core.folding import fold, shared, spread
from baton.quantization.core.grid import dequantize, fit

POWERS = tuple(step / 12 for step in range(12))  # of an input's mean size; 0 leaves the layer unchanged


def scale_inputs(block: Block, stage: Stage, bits: int, group: int, dtype: torch.dtype) -> None:
    """Fold the scales with which plain rounding of the stage's weights costs its outputs least."""
    sizes = torch.stack([x.abs().mean(dim=0) for x in stage.inputs]).mean(dim=0)
    sizes = shared(block, stage, sizes).clamp_(min=1e-4)
    moment = stage.second_moment()
    weight = torch.cat([block.weights[name] for name in stage.names])

    def cost(scales: Tensor) -> float:
        factors = spread(block, stage, scales)
        scaled = weight * factors
        return output_error(dequantize(fit(scaled, bits, group, dtype), scaled) / factors - weight, moment)

    candidates = [_centred(sizes**power) for power in POWERS]
    fold(block, stage, min(candidates, key=cost), dtype)


def output_error(difference: Tensor, moment: Tensor) -> float:
    """Return the mean squared error of the outputs of a layer whose weights are off by `difference` [out, in]."""
    return (difference @ moment).mul_(difference).sum().item()


def _centred(scales: Tensor) -> Tensor:
    return scales / (scales.amax() * scales.amin()).sqrt()
