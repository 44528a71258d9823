"""Multiply rows on a GPU by one of several weights each, in one launch for all (kernels/grouped.py): the experts of a
mixture, or the heads of latent attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from baton.engine.core.model_spec import ExpertsSpec, ModelSpec
from baton.engine.kernels import grouped as kernels
from baton.engine.kernels.quantize import RoundedRows
from baton.engine.kernels.rows import Clamp, swiglu, swiglu_rounded
from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.triton import EXACT_TILES, TILES, GpuLinear
from baton.engine.layers.row_parallel import RowParallelLinear
from baton.engine.parallel.collectives import Collectives

SORT_BLOCK, ADD_BLOCK = 1024, 1024
MIN_BINS = 128  # one for each thread of the histogram's program


class SortedPlaces(NamedTuple):
    """Hold places (pairs of a row and a weight) in the order of their weights, cut into tiles."""

    order: Tensor  # int32 [places]
    tiles: Tensor  # int32 [3, slots], as kernels.sort leaves them
    tile: int  # rows per tile


def sort_places(owners: Tensor, num_owners: int, exact: bool) -> SortedPlaces:
    """Sort places by weight: owners, integers [places], contiguous, of `num_owners` weights. Nothing is copied to the
    host. `exact`: in tiles that multiply a row in one way, however many rows there are."""
    num_places = owners.numel()
    tile = tile_of(num_places // num_owners, exact)
    num_slots = min(num_places, num_owners) + num_places // tile
    order = torch.empty(num_places, dtype=torch.int32, device=owners.device)
    tiles = torch.empty(3, num_slots, dtype=torch.int32, device=owners.device)
    bins = max(MIN_BINS, triton.next_power_of_2(num_owners + 1))
    kernels.sort[(num_owners,)](
        owners, order, tiles, num_places, num_slots, NUM_OWNERS=num_owners, BINS=bins, TILE=tile, BLOCK=SORT_BLOCK
    )
    return SortedPlaces(order, tiles, tile)


def tile_of(rows: int, exact: bool) -> int:
    """Return the rows per tile, for `rows` rows of a weight on average."""
    tiles = EXACT_TILES if exact else TILES
    return next((tile for tile in tiles if rows < 2 * tile), tiles[-1])


class GroupedLinear:
    """Multiply by weights of one shape and form, which lie one after the other in memory."""

    def __init__(self, linears: Sequence[GpuLinear]):
        """Join weights that `unfit` accepts. They remain usable, in the same memory."""
        self._one = one = linears[0]
        stored = [linear.stored for linear in linears]
        self._values, self._scales, self._offsets, self._bias = (
            None if parts[0] is None else torch.stack(parts)
            for parts in (
                [each.values for each in stored], [each.scales for each in stored], [each.offsets for each in stored],
                [linear.bias for linear in linears],
            )
        )  # fmt: skip
        for index, linear in enumerate(linears):
            values, scales, offsets, bias = (
                None if part is None else part[index]
                for part in (self._values, self._scales, self._offsets, self._bias)
            )
            linear.move(replace(linear.stored, values=values, scales=scales, offsets=offsets), bias)
        self.rounding, self.batch_invariant = one.rounding, one.batch_invariant

    @staticmethod
    def unfit(linears: Sequence[LinearKernel]) -> str:
        """Return why these cannot be one product; "" if they can."""
        forms = set()
        for linear in linears:
            if not isinstance(linear, GpuLinear):
                return "a weight has parts of several forms"
            if linear.has_own_inputs:
                return "weights have their inputs in another order, or outliers"
            forms.add((linear.key, linear.rounding, linear.leaves, linear.bias is None))
        return "" if len(forms) == 1 else "weights differ in form"

    def __call__(self, x: Tensor | RoundedRows, places: SortedPlaces, top_k: int = 0, scatters: bool = False) -> Tensor:
        """Return [places, out_features]. `top_k`: neighbouring places that share a row of x; 0: x has a row for each
        place, in sorted order. `scatters`: y is in the original order of places, else in sorted order."""
        x, x_scales = self._one.activated(x, None)
        y = torch.empty(places.order.numel(), self._one.stored.num_out, dtype=self._one.dtype_of_y, device=x.device)
        self._launch(x, x_scales, y, places.tile, places.tiles.shape[1], 0, places, top_k, scatters)
        return y

    def each(self, x: Tensor) -> Tensor:
        """Multiply x [T, weights, in_features], contiguous, each part of a row by its own weight -> [T, weights,
        out_features]."""
        num_rows, num_owners = x.shape[:2]
        flat, x_scales = self._one.activated(x.flatten(0, 1), None)
        y = torch.empty(num_rows, num_owners, self._one.stored.num_out, dtype=self._one.dtype, device=x.device)
        tile = tile_of(num_rows, self.batch_invariant)
        self._launch(flat, x_scales, y, tile, num_owners * -(-num_rows // tile), num_rows, None, 1, True)
        return y

    def _launch(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        y: Tensor,
        tile: int,
        num_slots: int,
        num_rows: int,
        places: SortedPlaces | None,
        top_k: int,
        scatters: bool,
    ) -> None:
        one, stored, constants = self._one, self._one.stored, self._one.constants(tile)
        order, tiles = (None, None) if places is None else places[:2]
        kernels.multiply_grouped[(num_slots, -(-stored.num_out // constants["BLOCK_N"]))](
            x, self._values, self._scales, self._offsets, self._bias, x_scales, y, order, tiles,
            num_slots, num_rows, len(self._values), stored.num_out, stored.num_in, x.stride(0), stored.values.stride(0),
            stored.group, stored.num_in // stored.group, one.segment_len, one.num_segments,
            TOP_K=top_k, SCATTERS=scatters, **constants,
        )  # fmt: skip


class GroupedExperts:
    """Compute the outputs of a layer's chosen experts and add them by weight, in five launches, with a sum over ranks
    in between if each rank has a part of every expert."""

    def __init__(
        self,
        spec: ModelSpec,
        experts: ExpertsSpec,
        gate_up: Sequence[LinearKernel],
        down: Sequence[LinearKernel],
        collectives: Collectives | None,
    ):
        """Join experts that `unfit` accepts. `collectives`: of the ranks that have a part of each; None: they are whole
        here."""
        self._gate_up, self._down, self._collectives = GroupedLinear(gate_up), GroupedLinear(_parts(down)), collectives
        self._num_experts, self._scales_inputs = experts.num_experts, experts.scales_inputs
        clamped = spec.activation == "clamped_swiglu"
        self._clamp: Clamp | None = (spec.swiglu_alpha, spec.swiglu_limit) if clamped else None

    @staticmethod
    def unfit(spec: ModelSpec, gate_up: Sequence[LinearKernel], down: Sequence[LinearKernel]) -> str:
        """Return why these experts cannot be one product for each side; "" if they can."""
        if not spec.gated or spec.activation not in ("silu", "clamped_swiglu"):
            return f"activation {spec.activation}" + ("" if spec.gated else ", without a gate")
        turns = (each.unfit_for_groups for each in down if isinstance(each, RowParallelLinear))
        return GroupedLinear.unfit(gate_up) or next(filter(None, turns), "") or GroupedLinear.unfit(_parts(down))

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Apply experts to x [T, in], chosen int64 and weights fp32 [T, num_chosen] -> fp32 [T, out], adding a row's
        experts in the order in which they were chosen."""
        num_rows, num_chosen = chosen.shape
        places = sort_places(chosen.flatten(), self._num_experts, self._down.batch_invariant)
        top_k = num_chosen
        if self._scales_inputs:
            x, top_k = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1), 1
        gate_up = self._gate_up(x, places, top_k)
        rounding = self._down.rounding
        moved = swiglu(gate_up, self._clamp) if rounding is None else swiglu_rounded(gate_up, rounding, self._clamp)
        outputs, ranks = self._down(moved, places, scatters=True), self._collectives
        if ranks is not None and not ranks.fast:
            outputs = ranks.sum(outputs, x.dtype)  # of each expert by itself, rounded as a single rank rounds it
        total = torch.empty(num_rows, outputs.shape[1], dtype=torch.float32, device=x.device)
        kernels.add_chosen[(num_rows, triton.cdiv(outputs.shape[1], ADD_BLOCK))](
            outputs, weights, total, outputs.shape[1], NUM_CHOSEN=num_chosen, WEIGHTED=not self._scales_inputs,
            BLOCK=ADD_BLOCK, enable_fp_fusion=not self._down.batch_invariant,
        )  # fmt: skip
        return total if ranks is None or not ranks.fast else ranks.sum(total, x.dtype).float()


def _parts(down: Sequence[LinearKernel]) -> list[LinearKernel]:
    """Return this rank's part of each weight."""
    return [each.part if isinstance(each, RowParallelLinear) else each for each in down]
