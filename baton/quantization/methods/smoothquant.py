"""SmoothQuant (Xiao et al., arXiv 2211.10438): make input channels with large values smaller and their weights larger,
so that int8 activations lose less."""

import torch
from torch import Tensor

from baton.quantization.core.block import Block, Stage
from baton.quantization.core.folding import fold, shared, spread
from baton.quantization.core.grid import dequantize, fit

POWERS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # the paper's alpha: how much of the difficulty moves to the weights
NUM_ROWS = 512  # inputs on which alpha is chosen


def smooth_inputs(block: Block, stage: Stage, dtype: torch.dtype) -> None:
    """Fold s = max |x| ^ alpha / max |w| ^ (1 - alpha), with the alpha that costs the stage's outputs least once
    activations (per row) and weights (per row) are int8; fold nothing if that is best."""
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
    """Return x [rows, in] rounded to int8 activations: one symmetric scale per row, max |x| / 127."""
    scales = (x.abs().amax(dim=1, keepdim=True) / 127).clamp_(min=1e-12)
    return torch.round(x / scales) * scales
