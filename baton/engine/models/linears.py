"""Build a model's linear layers: read, merge and pick the kernels of their weights, and report what was made."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.model_errors import ModelError
from baton.engine.core.model_spec import ExpertsSpec
from baton.engine.layers.linear import JoinedLinear, LinearKernel
from baton.engine.layers.row_parallel import RowParallelLinear
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.shard import WHOLE
from baton.engine.weights.formats.base import WeightSource
from baton.engine.weights.forms import Weight, form_name
from baton.engine.weights.leaves import inputs_of, leaves_of, order_of
from baton.engine.weights.merge import merge, pad, split_rows, take_rows

# (weight, bias, leaves, partial, number of outputs of the whole weight if this is a rank's part) -> kernel
Make = Callable[..., LinearKernel]


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Report the forms, kernels and sizes of a model's linear weights in this process."""

    weights_by_form: Mapping[str, int]
    weights_by_kernel: Mapping[str, int]
    num_bytes: int  # of the kernels, resident or mapped
    file_bytes: int
    read_bytes: int  # of the files
    notes: tuple[str, ...]  # weights that were not read as they are stored
    num_leaves: int  # the most leaves of exact sums, which ranks can share

    @property
    def form(self) -> str:
        """Return all forms, the most frequent first: "int4-g32-asym+int8-g16"."""
        return "+".join(_by_count(self.weights_by_form))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the names of all kernels, the most frequent first."""
        return tuple(_by_count(self.weights_by_kernel))

    def beside(self, others: Sequence["WeightReport"]) -> "WeightReport":
        """Return this process's sizes with the forms and kernels of the other processes too, which have other
        layers."""
        all_ = (self, *others)
        return replace(
            self,
            weights_by_form=sum((Counter(each.weights_by_form) for each in all_), Counter()),
            weights_by_kernel=sum((Counter(each.weights_by_kernel) for each in all_), Counter()),
            num_leaves=max(each.num_leaves for each in all_),
        )

    def __str__(self) -> str:
        sizes = f"{self.num_bytes / (1 << 20):.1f} MiB in kernels, {self.file_bytes / (1 << 20):.1f} MiB in files"
        return f"{self.form} ({'; '.join((sizes, *self.notes))})"


def _by_count(counts: Mapping[str, int]) -> list[str]:
    return [name for name, _ in Counter(counts).most_common()]


class Linears:
    """Make the kernels of one source's modules, and count them."""

    def __init__(self, source: WeightSource, make: Make, collectives: Collectives | None = None):
        """Make kernels of `source`; with `collectives`, of this rank's part of every weight."""
        self._source, self._make, self.collectives = source, make, collectives
        self.shard = WHOLE if collectives is None else collectives.shard
        self.left_out: list[str] = []  # modules that only other ranks read
        self._forms: Counter[str] = Counter()
        self._kernels: Counter[str] = Counter()
        self._num_bytes, self._num_leaves = 0, 1
        self.row_multiple = 1  # of all kernels made so far

    def report(self) -> WeightReport:
        """Return the report of all linear layers made so far."""
        notes = tuple(f"{count} x {what}" for what, count in self._source.notes.items())
        sizes = self._num_bytes, self._source.file_bytes, self._source.read_bytes
        return WeightReport(dict(self._forms), dict(self._kernels), *sizes, notes, self._num_leaves)

    def read(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int,
        bias: bool,
        rows: int = 0,
        columns: int = 0,
        orders: Sequence[Tensor | None] = (),
        parts: int = 1,
        row_parallel: bool = False,
        column_parallel: bool = False,
        cut: bool = True,
        num_outputs: int = 0,
    ) -> LinearKernel:
        """Return one kernel for modules that share their input, with their outputs one after the other.

        `orders`: which outputs of each module, int64; None: all, as stored. A module consists of `parts` of equal size,
        one above the other; `rows` zeros follow the outputs of each part, `columns` zeros its inputs. `row_parallel`
        and `cut` as in `make`; `column_parallel`: a rank has its share of the outputs of each part. `num_outputs`: the
        number on all ranks, if `orders` names only some of them.
        """
        weights, biases = [], []
        for module, size, order in zip(modules, sizes, orders or [None] * len(modules), strict=True):
            weight = self._source.linear(module, size, in_features)
            vector = self._source.tensor(f"{module}.bias", size) if bias else weight.values.new_empty(size)
            if order is not None:
                order = order.to(weight.values.device)
                weight, vector = take_rows(weight, order), vector[order]
            weights += [pad(part, rows, columns) for part in split_rows(weight, parts)]
            biases += [F.pad(part, (0, rows)) for part in vector.chunk(parts)]
        return self._join(weights, biases if bias else [], row_parallel, column_parallel, cut, num_outputs)

    def expert(
        self,
        name: str,
        index: int,
        experts: ExpertsSpec,
        out_features: int,
        in_features: int,
        rows: int = 0,
        columns: int = 0,
        parts: int = 1,
        interleaved: bool = False,
        row_parallel: bool = False,
        column_parallel: bool = False,
        cut: bool = True,
    ) -> LinearKernel:
        """Return the kernel of one of the experts in a tensor [experts, out_features, in_features] or [experts,
        in_features, out_features]. `interleaved`: its parts alternate among its outputs. Otherwise as `read`."""
        count = experts.num_experts
        weight = self._source.expert(name, index, count, out_features, in_features, experts.inputs_first)
        bias = self._source.tensor(f"{name}_bias", count, out_features)[index] if experts.bias else None
        if interleaved:
            order = torch.arange(out_features, device=weight.values.device).view(-1, parts).t().flatten()
            weight, bias = take_rows(weight, order), None if bias is None else bias[order]
        biases = [] if bias is None else [F.pad(part, (0, rows)) for part in bias.chunk(parts)]
        weights = [pad(part, rows, columns) for part in split_rows(weight, parts)]
        return self._join(weights, biases, row_parallel, column_parallel, cut)

    def _join(
        self,
        weights: list[Weight],
        biases: list[Tensor],
        row_parallel: bool,
        column_parallel: bool,
        cut: bool,
        num_outputs: int = 0,
    ) -> LinearKernel:
        if column_parallel:
            num_outputs = sum(part.shape[0] for part in weights)
            weights = [self.shard_outputs(part) for part in weights]
            biases = [part[slice_of(self.shard.range_of(len(part)))] for part in biases]
        return self.make(weights, torch.cat(biases) if biases else None, row_parallel, cut, num_outputs)

    def make(
        self,
        weights: Sequence[Weight],
        bias: Tensor | None = None,
        row_parallel: bool = False,
        cut: bool = True,
        num_outputs: int = 0,
    ) -> LinearKernel:
        """Make a kernel for weights one above the other, [out, in] each; if their forms disagree it joins several
        kernels. `bias`: [sum of out]. `row_parallel`: ranks have some of the inputs each, so that their sum is a tree,
        or with `cut` false all of them. `num_outputs`: the number on all ranks, if each has some; 0: all are here."""
        merged = merge(weights)
        own = sum(weight.shape[0] for weight in merged)
        outputs = [weight.shape[0] * (num_outputs or own) // own for weight in merged]
        biases = [None] * len(merged) if bias is None else bias.split([weight.shape[0] for weight in merged])
        leaves = [leaves_of(weight) if row_parallel else 1 for weight in merged]
        make = self._make_part if row_parallel and cut and self.collectives is not None else self._make_whole
        kernels = [make(*parts) for parts in zip(merged, biases, leaves, outputs, strict=True)]
        for weight, kernel, count in zip(merged, kernels, leaves, strict=True):
            num_values = weight.shape[0] * weight.shape[1]
            self._forms[form_name(weight)] += num_values
            self._kernels[kernel.name] += num_values
            self._num_bytes += kernel.num_bytes
            self.row_multiple = max(self.row_multiple, kernel.row_multiple)
            self._num_leaves = max(self._num_leaves, count if kernel.batch_invariant else 1)
        return kernels[0] if len(kernels) == 1 else JoinedLinear(kernels)

    def shard_outputs(self, weight: Weight) -> Weight:
        """Return this rank's outputs of a weight."""
        if self.shard.degree == 1:
            return weight
        return take_rows(weight, torch.tensor(self.shard.range_of(weight.shape[0])))

    def _make_whole(self, weight: Weight, bias: Tensor | None, leaves: int, num_outputs: int) -> LinearKernel:
        return self._make(weight, bias, leaves, False, num_outputs)

    def _make_part(self, weight: Weight, bias: Tensor | None, leaves: int, num_outputs: int) -> LinearKernel:
        """Make the kernel of this rank's inputs. Raises ModelError if they are not whole leaves."""
        assert self.collectives is not None
        rank, degree = self.shard.rank, self.shard.degree
        if leaves % degree:
            cut = f"{weight.shape[1]} inputs of a weight ({form_name(weight)}) are cut into {leaves} parts at most"
            raise ModelError(f"tensor_parallel {degree}: {cut}")
        inputs, order = inputs_of(weight, rank, degree), order_of(weight, rank, degree)
        if not self.collectives.fast:
            part = self._make(inputs, None, leaves // degree, True, num_outputs)
            return RowParallelLinear(part, bias, order, self.collectives)
        part = self._make(inputs, bias if rank == 0 else None, 1, False, num_outputs)
        return RowParallelLinear(part, None, order, self.collectives)


def slice_of(numbers: range) -> slice:
    """Return a range of consecutive numbers as a slice."""
    return slice(numbers.start, numbers.stop)
