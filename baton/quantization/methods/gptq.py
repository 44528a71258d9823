"""GPTQ (Frantar et al., arXiv 2210.17323): round inputs one after the other, and let those that are not rounded yet
compensate each error, as far as the second moment of the layer's inputs allows."""

import torch
from torch import Tensor

from baton.quantization.core.grid import Grid

DAMPING = 0.01  # of the mean diagonal: keeps the factorization stable if inputs are nearly dependent
COLUMNS = 128  # rounded before the later columns are updated


def round_compensated(weight: Tensor, moment: Tensor, grid: Grid) -> Tensor:
    """Return q, fp32 whole numbers [out, in] on `grid`. `weight` is fp32 [out, in]; `moment` [in, in] is that of the
    inputs.

    Inputs are rounded in the order of their energy (act-order), the largest first, while all others can still
    compensate. The grid is that of the original weights, so each group stays together and no order is stored."""
    order = torch.argsort(moment.diagonal(), descending=True)
    factor = _inverse_factor(moment[order][:, order])
    rest = weight[:, order].clone()
    rounded = torch.empty_like(rest)
    num_columns = rest.shape[1]
    for begin in range(0, num_columns, COLUMNS):
        end = min(begin + COLUMNS, num_columns)
        errors = torch.empty(rest.shape[0], end - begin)
        for column in range(begin, end):
            rounded[:, column], value = grid.round_column(rest[:, column], int(order[column]))
            error = (rest[:, column] - value) / factor[column, column]
            rest[:, column:end].addr_(error, factor[column, column:end], alpha=-1)
            errors[:, column - begin] = error
        rest[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return torch.empty_like(rounded).index_copy_(1, order, rounded)


def _inverse_factor(moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moment. An input that is always zero counts as
    independent of all others."""
    moment = moment.clone()
    diagonal = moment.diagonal()
    diagonal.masked_fill_(diagonal == 0, 1.0)
    diagonal += DAMPING * diagonal.mean()
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moment)), upper=True)
