"""Make input channels smaller without changing what a layer computes: x / s into W * s, with the division folded into
what produced x (a norm's weight, or the rows of v or up). AWQ and SmoothQuant build on it."""

import torch
from torch import Tensor

from baton.quantization.core.block import Block, O, Stage


def shared(block: Block, stage: Stage, values: Tensor) -> Tensor:
    """Reduce values [in] of a stage to [channels of its source]: the largest, if several inputs come from one channel
    (a KV head that a group of query heads reads)."""
    if stage.names[0] != O:
        return values
    spec = block.spec
    return values.view(spec.num_kv_heads, -1, spec.head_dim).amax(dim=1).flatten()


def spread(block: Block, stage: Stage, values: Tensor) -> Tensor:
    """Expand values [channels of the source] to [in] of the stage."""
    if stage.names[0] != O:
        return values
    spec = block.spec
    group = spec.num_heads // spec.num_kv_heads
    return values.view(spec.num_kv_heads, 1, spec.head_dim).expand(-1, group, -1).flatten()


def fold(block: Block, stage: Stage, scales: Tensor, dtype: torch.dtype) -> None:
    """Divide the stage's inputs by `scales` [channels of the source] > 0, and multiply its weights by them.

    `dtype` is that of norms in the folder. A norm is rounded to it, and the weights are multiplied by the factor that
    the rounded norm really has, so the rounding costs nothing."""
    source = stage.source
    if source in block.norms:
        old = block.norms[source]
        new = (old / scales).to(dtype).float()
        kept = new == 0
        scales = torch.where(kept, 1.0, old / torch.where(kept, 1.0, new))
        block.norms[source] = torch.where(kept, old, new)
    else:
        block.weights[source] = block.weights[source] / scales.unsqueeze(1)
        if source in block.biases:
            block.biases[source] = (block.biases[source] / scales).to(dtype).float()
    factors = spread(block, stage, scales)
    for name in stage.names:
        block.weights[name] = block.weights[name] * factors
    for x in stage.inputs:
        x /= factors
