"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), absorbed: queries meet the latent rows themselves instead of
each head's keys and values, and outputs are computed from sums of latent rows. Chunks of a prompt and decode tokens
take the same path, so a token has the same bits in both.

A cached row, and the query of each head, is [rope part | latent] in the order in which a rope rotates halves; the row
is key and value at once. Values have no rope part: the product after them has zeros there.
"""

from typing import Any, cast

import torch
from torch import Tensor

from baton.engine.core.model_spec import LatentSpec, ModelSpec, NormSpec
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.norm import Norm, make_norm
from baton.engine.models.linears import Linears
from baton.engine.weights.formats.base import WeightSource
from baton.engine.weights.forms import DenseWeight

NORM = NormSpec(1e-6)  # of both latents, whatever rms_norm_eps is


class ByHead:
    """Apply one product per head, on a GPU all in one launch."""

    def __init__(self, kernels: list[LinearKernel]):
        """Hold floating-point weights of one shape."""
        self._kernels, self.num_heads, self._grouped = kernels, len(kernels), None
        if all(kernel.name == "triton" for kernel in kernels):
            from baton.engine.layers.grouped import GroupedLinear  # triton is an optional dependency

            self._grouped = GroupedLinear(cast(list[Any], kernels))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the products to x [T, heads, in] -> [T, heads, out]."""
        if self._grouped is not None:
            return self._grouped.each(x.contiguous())
        heads = x.transpose(0, 1).contiguous()
        return torch.stack([kernel(rows) for kernel, rows in zip(self._kernels, heads, strict=True)], dim=1)


class LatentProjection(LinearKernel):
    """Project hidden states to the queries of all heads followed by the row to cache, before rotation."""

    def __init__(
        self,
        latent: LatentSpec,
        query: list[LinearKernel],
        query_norm: Norm | None,
        keys: list[LinearKernel],
        row: LinearKernel,
        row_norm: Norm,
    ):
        """Hold `query`, one kernel or two with a norm between, and `keys`, which map nope_dim elements of each head to
        the latent's."""
        self._latent, self._query, self._query_norm = latent, query, query_norm
        self._keys, self._row, self._row_norm = ByHead(keys), row, row_norm
        _describe(self, [*query, *keys, row])

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        latent, num_heads = self._latent, self._keys.num_heads
        query = self._query[0](x)
        if self._query_norm is not None:
            query = self._query[1](self._query_norm(query))
        turned, still = query.unflatten(1, (num_heads, -1)).split((latent.rope_dim, latent.nope_dim), dim=2)
        absorbed = self._keys(still)
        key, row = self._row(x).split((latent.rope_dim, latent.rank), dim=1)
        rows = (
            torch.cat((turned, key.unsqueeze(1)), dim=1),
            torch.cat((absorbed, self._row_norm(row).unsqueeze(1)), dim=1),
        )
        return in_order_of_rope(*rows).flatten(1)


class LatentOutput(LinearKernel):
    """Project each head's attention output, a sum of cached rows, to hidden states."""

    def __init__(self, values: list[LinearKernel], output: LinearKernel):
        """Hold `values`, which map each head's sum of rows to value_dim elements."""
        self._values, self._output = ByHead(values), output
        _describe(self, [*values, output])

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        return self._output(self._values(x.unflatten(1, (self._values.num_heads, -1))).flatten(1))


def read_latent(
    spec: ModelSpec, prefix: str, order: Tensor | None, source: WeightSource, linears: Linears, own: range
) -> tuple[LatentProjection, LatentOutput]:
    """Return the attention's products of one layer for the heads `own`; every rank has the cached row. `order`: of a
    row's elements, so that a rope rotates halves. Raises ModelError if a tensor is missing or does not fit."""
    latent, num_heads, hidden = spec.latent, spec.num_heads, spec.hidden_size
    assert latent is not None
    turned = turning(latent, order)
    head = torch.cat((turned + latent.nope_dim, torch.arange(latent.nope_dim)))  # stored: nope, then rope
    heads, size = (torch.tensor(own).unsqueeze(1) * len(head) + head).flatten(), num_heads * len(head)
    row = torch.cat((turned + latent.rank, torch.arange(latent.rank)))
    if (rank := latent.query_rank) is None:
        query = [linears.read([f"{prefix}q_proj"], [size], hidden, False, orders=[heads], num_outputs=size)]
        query_norm = None
    else:
        query = [
            linears.read([f"{prefix}q_a_proj"], [rank], hidden, spec.qkv_bias),
            linears.read([f"{prefix}q_b_proj"], [size], rank, False, orders=[heads], num_outputs=size),
        ]
        query_norm = make_norm(NORM, source.tensor(f"{prefix}q_a_layernorm.weight", rank))
    kept = linears.read([f"{prefix}kv_a_proj_with_mqa"], [len(row)], hidden, spec.qkv_bias, orders=[row])
    row_norm = make_norm(NORM, source.tensor(f"{prefix}kv_a_layernorm.weight", latent.rank))
    keys, values = _read_absorbed(latent, num_heads, f"{prefix}kv_b_proj", source, linears, own)
    output = linears.read(
        [f"{prefix}o_proj"], [hidden], num_heads * latent.value_dim, spec.output_bias, row_parallel=True
    )
    return LatentProjection(latent, query, query_norm, keys, kept, row_norm), LatentOutput(values, output)


def _read_absorbed(
    latent: LatentSpec, num_heads: int, module: str, source: WeightSource, linears: Linears, own: range
) -> tuple[list[LinearKernel], list[LinearKernel]]:
    """Return the kernels of each head's transposed keys, and of its values, in floating point whatever the form:
    weights that were rounded by output cannot be transposed as they are."""
    weight = source.linear(module, num_heads * (latent.nope_dim + latent.value_dim), latent.rank)
    table = (weight.values if isinstance(weight, DenseWeight) else weight.dequantize()).unflatten(0, (num_heads, -1))
    table = table[own.start : own.stop]
    keys, values = table.split((latent.nope_dim, latent.value_dim), dim=1)
    # Values meet a whole row, with zeros for its rope part.
    values = in_order_of_rope(values.new_zeros(len(own), latent.value_dim, latent.rope_dim), values)
    return (
        [linears.make([DenseWeight(key.t().contiguous())]) for key in keys],
        [linears.make([DenseWeight(value.contiguous())]) for value in values],
    )


def turning(latent: LatentSpec, order: Tensor | None) -> Tensor:
    """Return the order of a row's rope part, int64 [rope_dim], for `in_order_of_rope`: the first elements of its pairs,
    then the second. `order`: of the whole row, whose rope part is stored first."""
    if order is None:
        return torch.arange(latent.rope_dim)
    return order[order < latent.rope_dim]


def in_order_of_rope(turned: Tensor, still: Tensor) -> Tensor:
    """Arrange the rope part [..., rope_dim] and the latent [..., rank] as rows [..., row_dim], in which a rope rotates
    the beginning of the first half with that of the second."""
    first, second = turned.chunk(2, dim=-1)
    low, high = still.chunk(2, dim=-1)
    return torch.cat((first, low, second, high), dim=-1)


def _describe(kernel: LinearKernel, parts: list[LinearKernel]) -> None:
    """Describe a kernel made of several, which is as exact as the least exact of them."""
    kernel.name = "+".join(dict.fromkeys(part.name for part in parts))
    kernel.batch_invariant = all(part.batch_invariant for part in parts)
    kernel.row_multiple = max(part.row_multiple for part in parts)
