"""Input channels made smaller without changing what a layer computes: x / s into W * s, the division folded into what
produced x (a norm's weight, or the rows of v or up). AWQ and SmoothQuant both build on it."""

import torch
from torch import Tensor

from baton.quantization.core.block import Block, O, Stage


def shared(block: Block, stage: Stage, values: Tensor) -> Tensor:
    """[in] of a stage -> [channels of its source]: the largest where several inputs come out of one channel (a KV head
    that is read by a group of query heads)."""
    if stage.names[0] != O:
        return values
    spec = block.spec
    return values.view(spec.num_kv_heads, -1, spec.head_dim).amax(dim=1).flatten()


def spread(block: Block, stage: Stage, values: Tensor) -> Tensor:
    """[channels of the source] -> [in] of the stage."""
    if stage.names[0] != O:
        return values
    spec = block.spec
    group = spec.num_heads // spec.num_kv_heads
    return values.view(spec.num_kv_heads, 1, spec.head_dim).expand(-1, group, -1).flatten()


def fold(block: Block, stage: Stage, scales: Tensor, dtype: torch.dtype) -> None:
    """Divide the stage's inputs by `scales` [channels of the source] > 0 and multiply its weights by them.

    `dtype`: what the folder stores norms in. A norm is rounded to it, and the weights are multiplied by what it really
    was divided by, so that the rounding costs nothing.
    """
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
