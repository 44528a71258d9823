"""The form in which a folder or .gguf file is stored, if workers serve it as it is, and what they hold of it. The
loader's own readers are used, but of all modules that are stored alike only one is read."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from baton.engine.core.model_spec import ExpertsSpec, ModelSpec
from baton.engine.kv.pool import DTYPES
from baton.engine.layers.embedding import Embedding
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.linear import choose as choose_linear
from baton.engine.models.linears import Linears
from baton.engine.models.read_layer import read_head, read_layer
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.shard import Shard
from baton.engine.weights.formats.registry import AUTO, open_source
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight
from baton.engine.weights.on_gpu import store, unfit_on_gpu
from baton.planning.devices import Device


class HeldWeights(NamedTuple):
    """Bytes that a worker, or each rank if several share its layers, holds of a model. `form` and `head_form` are none,
    int8, int4-gN or fp8, by which the speeds of kernels are known; `computes` is bf16, fp32, int8 or fp8, the form in
    which layers multiply."""

    form: str
    head_form: str
    computes: str
    layer_bytes: int  # linear weights of all layers, with routers
    head_bytes: int
    other_bytes: int  # embedding and norms

    @property
    def kernel_bytes(self) -> int:
        return self.layer_bytes + self.head_bytes


class StoredForm:
    """The form of one model for workers on one kind of device that compute in `dtype`. As a string it lists the forms
    of its weights, the most frequent first."""

    def __init__(self, spec: ModelSpec, device: Device, dtype: str = "bf16"):
        """Read the model's files. Raises ModelError for files that no worker would read."""
        self._spec, self._device, self._dtype = spec, device, DTYPES[dtype]
        self._held: dict[int, HeldWeights] = {}
        self._name = ""
        self.held()

    def __str__(self) -> str:
        return self._name

    def held(self, degree: int = 1) -> HeldWeights:
        """Return what each of `degree` ranks holds. Raises ModelError if its weights cannot be divided so."""
        if degree not in self._held:
            self._held[degree] = self._read(degree)
        return self._held[degree]

    def _read(self, degree: int) -> HeldWeights:
        spec, dtype, shard = self._spec, self._dtype, Shard(0, degree)
        names = spec.names.renamed
        source = open_source(spec.folder, AUTO, dtype, spec.num_heads, spec.num_kv_heads, names)
        make, make_router = self._maker(dtype), self._maker(torch.float32)
        linears = SampledLinears(source, make, None if degree == 1 else cast(Collectives, PlannedRanks(shard)))
        layers = [read_layer(spec, index, source, linears, make_router, shard) for index in range(spec.num_layers)]
        routers = sum(layer.experts.router.num_bytes for layer in layers if layer.experts is not None)
        of_layers = linears.report()
        embedding = source.embedding(spec.vocab_size, spec.hidden_size)
        read_head(spec, source, linears, embedding)
        whole = linears.report()
        head_form = next(iter(Counter(whole.weights_by_form) - Counter(of_layers.weights_by_form)))
        self._name = self._name or whole.form
        num_values = spec.vocab_size * spec.hidden_size if self._has_table(embedding, head_form) else 0
        return HeldWeights(
            nearest(of_layers.form),
            nearest(head_form),
            self._computes(of_layers.form),
            of_layers.num_bytes + routers,
            whole.num_bytes - of_layers.num_bytes,
            norm_bytes(spec, dtype.itemsize) + num_values * dtype.itemsize,
        )

    def _has_table(self, embedding: Callable[[Tensor], Tensor], head_form: str) -> bool:
        """Return whether a worker holds an embedding besides its output head."""
        if isinstance(embedding, Embedding):
            return not self._spec.tied or nearest(head_form) != "none"
        return self._device.kind != "cpu"  # a GPU cannot expand rows of a mapped file

    def _maker(self, dtype: torch.dtype) -> Callable[..., LinearKernel]:
        """Return a factory of kernels that compute in `dtype`."""
        if self._device.kind == "cpu":
            return choose_linear("auto", True, dtype)[0]
        multiplies_fp8 = "fp8" in self._device.flops_per_s
        return lambda weight, bias=None, *_: WeightOnGpu(weight, bias, dtype, multiplies_fp8)

    def _computes(self, form: str) -> str:
        """Return the form in which layers multiply. A CPU rounds rows for all integer weights, a GPU if the form says
        so. Other rows are multiplied as they are."""
        nearest_form, as_they_are = nearest(form), "fp32" if self._dtype == torch.float32 else "bf16"
        if self._device.kind == "cpu":
            return "int8" if nearest_form.startswith("int") else as_they_are
        rounds = any(word in form.split("+")[0] for word in ("dynamic", "static"))
        return nearest_form if rounds and nearest_form in self._device.flops_per_s else as_they_are


class SampledLinears(Linears):
    """Linears that read only one of all modules that are stored alike: for sizes, not for a model. Properties that only
    the values tell, such as zero points in the middle or a trivial order of inputs, are taken from that module."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._known: dict[Hashable, tuple[LinearKernel, Counter[str], int]] = {}

    def read(self, modules: Sequence[str], sizes: Sequence[int], *arguments, orders=(), **named) -> LinearKernel:
        kinds = tuple(self._source.kind(module) for module in modules)
        key = kinds, tuple(sizes), arguments, tuple(sorted(named.items()))
        return self._once(key, lambda: Linears.read(self, modules, sizes, *arguments, orders=orders, **named))

    def expert(self, name: str, index: int, experts: ExpertsSpec, *arguments, **named) -> LinearKernel:
        module, _, last = name.rpartition(".")
        key = self._source.kind(module), last, arguments, tuple(sorted(named.items()))
        return self._once(key, lambda: Linears.expert(self, name, index, experts, *arguments, **named))

    def _once(self, kind: Hashable, read: Callable[[], LinearKernel]) -> LinearKernel:
        if kind not in self._known:
            before = self._forms, self._num_bytes
            self._forms, self._num_bytes = Counter(), 0
            kernel = read()
            self._known[kind] = kernel, self._forms, self._num_bytes
            self._forms, self._num_bytes = before
        kernel, forms, num_bytes = self._known[kind]
        self._forms += forms
        self._num_bytes += num_bytes
        return kernel


class WeightOnGpu(LinearKernel):
    """The size of a weight on a GPU, without a GPU here."""

    name, batch_invariant, row_multiple = "gpu", True, 1

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, multiplies_fp8: bool):
        out, inputs = weight.shape
        expanded = isinstance(weight, DenseWeight) or unfit_on_gpu(weight, dtype)
        if expanded or (isinstance(weight, Fp8Weight) and not multiplies_fp8):
            own = out * inputs * dtype.itemsize
        else:
            own = store(weight, dtype).num_bytes
        if isinstance(weight, IntWeight) and weight.outliers is not None:
            own += weight.outliers.values.numel() * dtype.itemsize
        self._num_bytes = own + (0 if bias is None else 4 * bias.numel())

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        raise AssertionError("nothing is computed here")


class PlannedRanks(NamedTuple):
    """The part of Collectives that `Linears` needs if nothing is computed."""

    shard: Shard
    fast: bool = False


def nearest(form: str) -> str:
    """Return the nearest form whose speeds are known; `form` is the most frequent one of a WeightReport."""
    known = (name for name in ("int8", "fp8", "int4-g32") if form.startswith(name.partition("-")[0]))
    return next(known, "none")


def norm_bytes(spec: ModelSpec, value_bytes: int = 2) -> int:
    return (2 * spec.num_layers + 1) * spec.hidden_size * value_bytes
