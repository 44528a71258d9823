"""SmoothQuant (Xiao et al., arXiv 2211.10438): input channels with large values are made smaller and their weights
larger, so that int8 activations lose less."""

import torch
from torch import Tensor

from baton.quantization.core.block import Block, Stage
from baton.quantization.core.folding import fold, shared, spread
from baton.quantization.core.grid import dequantize, fit

POWERS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # the paper's alpha: how much of the difficulty goes to the weights
NUM_ROWS = 512  # inputs that the choice is made on


def smooth_inputs(block: Block, stage: Stage, dtype: torch.dtype) -> None:
    """Fold s = max |x| ^ alpha / max |w| ^ (1 - alpha), with the alpha that costs the stage's outputs least once
    activations (per row) and weights (per row) are int8; none at all where that is better still."""
    weight = torch.cat([block.weights[name] for name in stage.names])
    activations = shared(block, stage, stage.largest()).clamp_(min=1e-5)
    weights = shared(block, stage, weight.abs().amax(dim=0)).clamp_(min=1e-5)
    rows = stage.rows(NUM_ROWS)
    exact = rows @ weight.T

    def cost(scales: Tensor) -> float:
        factors = spread(block, stage, scales)
        scaled = weight * factors
        rounded = dequantize(fit(scaled, 8, scaled.shape[1], dtype), scaled)
        return (round_rows(rows / factors) @ rounded.T - exact).square().sum().item()

    candidates = [activations**power / weights ** (1 - power) for power in POWERS]
    fold(block, stage, min([torch.ones_like(activations), *candidates], key=cost), dtype)


def round_rows(x: Tensor) -> Tensor:
    """x [rows, in] as int8 activations hold it: one symmetric scale a row, max |x| / 127."""
    scales = (x.abs().amax(dim=1, keepdim=True) / 127).clamp_(min=1e-12)
    return torch.round(x / scales) * scales
