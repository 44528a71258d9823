"""A mixture of experts: every row goes to the few experts for which its router's score is highest.

It is batch-invariant: a row is routed by itself, in fp32, with equal scores ordered by index. The rows of an expert are
gathered by a counting sort and go through its row-invariant linears. The outputs of a row's experts are added in the
order in which it chose them, in fp32. Experts that no row chose are not read. On a GPU all this takes a few launches
(layers/grouped.py) if the experts' weights have one form.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.model_spec import ExpertsSpec, ModelSpec
from baton.engine.layers.activation import VECTOR_STRIDE, by_rows, make_between
from baton.engine.layers.linear import LinearKernel
from baton.engine.models.linears import Linears
from baton.engine.weights.formats.base import WeightSource
from baton.engine.weights.forms import DenseWeight

if TYPE_CHECKING:
    from baton.engine.layers.grouped import GroupedExperts

MakeRouter = Callable[[DenseWeight, Tensor | None], LinearKernel]  # fp32 weight, bias -> the kernel for fp32 rows


class Experts:
    """Hold the router and the experts of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        experts: ExpertsSpec,
        prefix: str,
        source: WeightSource,
        linears: Linears,
        make_router: MakeRouter,
    ):
        """Read the experts of the layer whose tensor names begin with `prefix`. Raises ModelError if a tensor is
        missing or does not fit."""
        if experts.stacked_names and source.has(prefix + experts.stacked_names[-1]):
            experts = replace(experts, names=experts.stacked_names)
        self.spec, self._between = experts, make_between(spec)
        hidden = spec.hidden_size
        modules = [prefix + name for name in experts.names]
        scores = source.exact(f"{modules[0]}.weight", experts.num_experts, hidden)
        self.shared_gate_up = self.shared_down = None
        if experts.shared_size:
            shared = [prefix + name for name in experts.shared_names]
            if experts.shared_names[0]:  # the router gives one more score: the share of the shared expert
                scores = torch.cat((scores, source.exact(f"{shared[0]}.weight", 1, hidden)))
            width, modules_up = experts.shared_size, shared[1:-1]
            pads, parts = -width % VECTOR_STRIDE, (1 + spec.gated) // len(modules_up)  # in one tensor or one each
            sizes = [parts * width] * len(modules_up)
            self.shared_gate_up = linears.read(
                modules_up, sizes, hidden, False, rows=pads, parts=parts, column_parallel=True
            )
            self.shared_down = linears.read(shared[-1:], [hidden], width, False, columns=pads, row_parallel=True)
        self.to_latent = self.from_latent = None
        if inner := experts.latent_size:
            into, back = (prefix + name for name in experts.latent_names)
            self.to_latent = linears.read([into], [inner], hidden, False)
            self.from_latent = linears.read([back], [hidden], inner, False)
        bias = source.exact(f"{modules[0]}.bias", experts.num_experts) if experts.bias else None
        self.router = make_router(DenseWeight(scores), bias)
        self.correction: Tensor | None = None
        if experts.correction:
            self.correction = source.exact(prefix + experts.correction, experts.num_experts)
        self._collectives, shard = linears.collectives, linears.shard
        # Experts of this rank, whole or a part of each; the others are None.
        self.own = shard.range_of(experts.num_experts) if shard.whole_experts else range(experts.num_experts)
        self.gate_up: list[LinearKernel | None] = [None] * experts.num_experts
        self.down: list[LinearKernel | None] = [None] * experts.num_experts
        if not experts.stacked:
            others = (index for index in range(experts.num_experts) if index not in self.own)
            linears.left_out += [name.format(index) for index in others for name in modules[1:]]
        read = self._read_stacked if experts.stacked else self._read_apart
        for index in self.own:
            self.gate_up[index], self.down[index] = read(
                linears, modules[1:], index, inner or hidden, not shard.whole_experts
            )
        self.grouped, self.unfit = self._group(spec)

    def _group(self, spec: ModelSpec) -> tuple["GroupedExperts | None", str]:
        """Return what computes all experts in one go on a GPU, or why nothing does; neither on a CPU."""
        if any(kernel is not None and kernel.name != "triton" for kernel in (*self.gate_up, *self.down)):
            return None, ""
        if len(self.own) < self.spec.num_experts:
            return None, "a rank has some of the experts, whole (--expert-parallel)"
        from baton.engine.layers.grouped import GroupedExperts  # triton is an optional dependency

        if why := GroupedExperts.unfit(spec, self.gate_up, self.down):
            return None, why
        return GroupedExperts(spec, self.spec, self.gate_up, self.down, self._collectives), ""

    def _read_stacked(
        self, linears: Linears, modules: list[str], index: int, hidden: int, cut: bool
    ) -> tuple[LinearKernel, LinearKernel]:
        spec, size = self.spec, self.spec.intermediate_size
        padding = -size % VECTOR_STRIDE
        gates = dict(rows=padding, parts=2, interleaved=spec.interleaved, column_parallel=cut)
        return (
            linears.expert(modules[0], index, spec, 2 * size, hidden, **gates),
            linears.expert(modules[1], index, spec, hidden, size, columns=padding, row_parallel=True, cut=cut),
        )

    def _read_apart(
        self, linears: Linears, modules: list[str], index: int, hidden: int, cut: bool
    ) -> tuple[LinearKernel, LinearKernel]:
        size = self.spec.intermediate_size
        padding = -size % VECTOR_STRIDE
        *wide, down = (name.format(index) for name in modules)
        return (
            linears.read(wide, [size] * len(wide), hidden, False, rows=padding, column_parallel=cut),
            linears.read([down], [hidden], size, False, columns=padding, row_parallel=True, cut=cut),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the chosen experts to x [T, hidden_size], normed -> [T, hidden_size] in the same dtype."""
        scores = self.router(x.float())
        chosen, weights = self.choose(scores[:, : self.spec.num_experts])
        read = x if self.to_latent is None else self.to_latent(x)
        total = (self._weighed if self.grouped is None else self.grouped)(read, chosen, weights)
        if self.from_latent is not None:
            total = self.from_latent(total.to(x.dtype)).float()
        if self.shared_gate_up is not None:
            shared = self.shared_down(self._between(self.shared_gate_up(x))).float()
            total = total + (shared * by_rows(torch.sigmoid, scores[:, -1:]) if self.spec.shared_names[0] else shared)
        return total.to(x.dtype)

    def _weighed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs of each row's experts, added in the order of choice, fp32 [T, elements]."""
        of_inputs = weights.flatten() if self.spec.scales_inputs else None
        outputs = self._run_chosen(x, chosen, of_inputs).unflatten(0, (-1, self.spec.num_chosen)).float()
        if of_inputs is None:
            outputs = outputs * weights.unsqueeze(2)
        total = outputs[:, 0]
        for slot in range(1, self.spec.num_chosen):
            total = total + outputs[:, slot]
        return total

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts by scores fp32 [T, num_experts] -> experts int64 and weights fp32, [T, num_chosen], best
        first; of equal scores the lower index."""
        spec = self.spec
        shares = F.softmax(scores, dim=1) if spec.scoring == "softmax" else by_rows(torch.sigmoid, scores)
        # Ranked before the shares are taken: different scores may have equal shares.
        ranked = scores if self.correction is None else shares + self.correction
        if spec.num_groups > 1:
            ranked = self._within_groups(ranked)
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : spec.num_chosen]
        weights = shares.gather(1, chosen)
        if spec.renormalized:
            weights = weights / (weights.sum(dim=1, keepdim=True) + (1e-20 if spec.scoring == "sigmoid" else 0.0))
        return chosen, weights if spec.scale == 1 else weights * spec.scale

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """Limit the ranking to the experts of the best groups, of equal groups the first."""
        spec = self.spec
        groups = ranked.unflatten(1, (spec.num_groups, -1))
        best = groups.sort(dim=2, descending=True).values[:, :, : spec.group_best].sum(dim=2)
        order = best.sort(dim=1, descending=True, stable=True).indices
        return groups.scatter(
            1, order[:, spec.num_chosen_groups :].unsqueeze(2).expand(-1, -1, groups.shape[2]), float("-inf")
        ).flatten(1)

    def _run_chosen(self, x: Tensor, chosen: Tensor, weights: Tensor | None) -> Tensor:
        """Return the outputs of each row's experts, [T * num_chosen, elements of a row], of rows times `weights` if
        given."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.spec.num_experts).tolist()
        sorted_outputs = [x.new_empty(0, x.shape[1])]
        for expert, places in enumerate(order.split(counts)):
            gate_up, down = self.gate_up[expert], self.down[expert]
            if len(places) and gate_up is not None and down is not None:
                rows = x[places // self.spec.num_chosen]
                if weights is not None:
                    rows = (rows * weights[places].unsqueeze(1)).to(x.dtype)
                sorted_outputs.append(down(self._between(gate_up(rows))))
        outputs = x.new_empty(flat.shape[0], x.shape[1])
        outputs[order] = self._gather_outputs(torch.cat(sorted_outputs), counts)
        return outputs

    def _gather_outputs(self, outputs: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs of the experts of all ranks, in order; `counts`: the rows of each expert."""
        if len(self.own) == len(counts) or self._collectives is None:
            return outputs
        sizes = [sum(counts[begin : begin + len(self.own)]) for begin in range(0, len(counts), len(self.own))]
        gathered = self._collectives.gather(F.pad(outputs, (0, 0, 0, max(sizes) - len(outputs))))
        assert gathered is not None
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])
