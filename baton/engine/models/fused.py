"""Run all layers of a step in one C call (native/layers/fused.cpp), if all their parts are native."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine import native
from baton.engine.adapters.low_rank import LINEARS
from baton.engine.adapters.native_low_rank import NativeAdapters
from baton.engine.attention.base import Attention
from baton.engine.attention.native import KINDS, NativeAttention
from baton.engine.core.batch import ForwardBatch
from baton.engine.core.model_spec import ModelSpec
from baton.engine.kv.pool import KVPool
from baton.engine.layers.activation import VECTOR_STRIDE
from baton.engine.layers.linear import LinearKernel
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.norm import Norm, RMSNorm
from baton.engine.layers.rope import Rope
from baton.engine.layers.row_parallel import RowParallelLinear
from baton.engine.models.experts import Experts
from baton.engine.models.gpu_layers import INTERPRETED_ATTENTION, GpuLayers
from baton.engine.models.layer import Layer
from baton.engine.parallel.collectives import Collectives, check
from baton.engine.parallel.shard import WHOLE, Shard

ROW_MULTIPLE = 16  # a row of the residual stream consists of whole vectors
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_NORMS = ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm")
# Numbered as in fused.h.
_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
_NORMS_OF_HEADS = {"": 0, "head": 0, "unit": 0, "heads": 1, "all": 2}


class _Norm(ctypes.Structure):
    """Mirror `Norm` of native/layers/fused.h."""

    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("kind", _INT), ("is_layer_norm", _INT)]


class _RowParallel(ctypes.Structure):
    """Mirror `RowParallel` of native/layers/fused.h."""

    _fields_ = [("bias", _POINTER), ("order", _POINTER)]


class _Experts(ctypes.Structure):
    """Mirror `Experts` of native/layers/fused.h."""

    _fields_ = [
        *((name, _INT) for name in ("num_experts", "num_chosen", "renormalized", "intermediate_size", "shared_size")),
        ("are_whole", _INT),
        *((name, _POINTER) for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down", "down_sums")),
        ("shared_down_sum", _RowParallel),
    ]


class _Layer(ctypes.Structure):
    """Mirror `Layer` of native/layers/fused.h."""

    _fields_ = [
        *((name, _Norm) for name in _NORMS),
        *((name, _POINTER) for name in (*LINEARS, "cos", "sin", "experts")),
        *((name, _RowParallel) for name in ("output_sum", "down_sum")),
    ]


class _Model(ctypes.Structure):
    """Mirror `Model` of native/layers/fused.h."""

    _fields_ = [
        *((name, _INT) for name in ("kind", "hidden_size", "intermediate_size")),
        *((name, _INT) for name in ("activation", "gated", "parallel", "norm_of_heads")),
        *((name, _POINTER) for name in ("layers", "shape")),
        *((name, ctypes.c_double) for name in ("eps", "residual_scale", "swiglu_alpha", "swiglu_limit")),
        ("ranks", _POINTER),
        ("num_kv_heads", _INT),
    ]


class _Step(ctypes.Structure):
    """Mirror `Step` of native/layers/fused.h."""

    _fields_ = [
        ("pool", _POINTER),
        ("seqs", _POINTER),
        ("num_seqs", _INT),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("num_tokens", _INT),
        ("num_threads", _INT),
        ("x", _POINTER),
        ("adapters", _POINTER),
        ("num_adapters", _INT),
    ]


class FusedLayers:
    """Run the layers of one model natively. Rows are independent of what shares their batch."""

    name = "fused"

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer | None],
        attention: NativeAttention,
        ropes: Sequence[Rope],
        collectives: Collectives | None = None,
    ):
        """Describe layers that `unfit` accepts, so that all linear layers are PackedLinear. `collectives`: of ranks
        that have a part each. Layers of other stages are None."""
        shard = WHOLE if collectives is None else collectives.shard
        self._attention = attention
        here = [index for index, layer in enumerate(layers) if layer is not None]
        self._own = range(here[0], here[-1] + 1)
        self._experts = [layer and layer.experts and _experts(layer.experts, shard) for layer in layers]
        self._held = (layers, ropes, collectives)  # the structs below point at these
        own = zip(layers, spec.layers, self._experts)  # a draft may have fewer layers than its target
        self._layers = (_Layer * len(layers))(*(_layer(layer, ropes, of.rope, experts) for layer, of, experts in own))
        self._model = _Model(
            kind=KINDS[attention.shape.dtype],
            hidden_size=spec.hidden_size,
            intermediate_size=_padded(spec.intermediate_size) // shard.degree,
            activation=_ACTIVATIONS.index(spec.activation),
            gated=spec.gated,
            parallel=spec.parallel,
            norm_of_heads=_NORMS_OF_HEADS[spec.qk_norm],
            layers=ctypes.addressof(self._layers),
            shape=attention.native_shape.buffer_info()[0],
            eps=spec.norm.eps,
            residual_scale=spec.residual_scale,
            swiglu_alpha=spec.swiglu_alpha,
            swiglu_limit=spec.swiglu_limit,
            ranks=None if collectives is None else collectives.address,
            num_kv_heads=spec.num_kv_heads,
        )
        self.adapters = NativeAdapters()
        library = native.library()
        self._run = library.function("baton_layers", _POINTER, _POINTER, _INT, _INT, restype=_INT)
        self._norm = library.function("baton_norm", _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)

    @property
    def address(self) -> int:
        """Return the address of the model's struct, for native code that runs the layers."""
        return ctypes.addressof(self._model)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @staticmethod
    def unfit(spec: ModelSpec, layers: Sequence[Layer | None], attention: Attention) -> str:
        """Return why a model's layers cannot be run this way; "" if they can."""
        if not isinstance(attention, NativeAttention):
            return f"attention is {attention.name}"
        if spec.latent is not None:
            return "attention is latent"
        if spec.state is not None:
            return "layers keep a state"
        if spec.attention_gate:
            return "attention is gated"
        if spec.temperature is not None:
            return "attention has a temperature"
        if spec.activation not in _ACTIVATIONS:
            return f"activation is {spec.activation}"
        if any(layer.experts is not None and not layer.experts.is_plain for layer in spec.layers):
            return "experts are chosen by more than the softmax of their scores"
        for layer in filter(None, layers):
            for part in _linears(layer):
                if not isinstance(_own(part), PackedLinear):
                    return f"a linear kernel is {part.name}"
        if spec.hidden_size % ROW_MULTIPLE:
            return f"hidden size {spec.hidden_size} is not a multiple of {ROW_MULTIPLE}"
        return ""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Change x [T, hidden_size] in place and return it, and write the KV of all layers that are here.

        `on_layer(layer)` is called at the end of each layer, when its KV is written.
        """
        plan = self._attention.plan(batch, pool)
        adapters = self.adapters.rows(batch.adapters)
        step = _Step(
            pool=ctypes.addressof(plan.pool),
            seqs=plan.address,
            num_seqs=len(batch.seqs),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            num_tokens=x.shape[0],
            num_threads=torch.get_num_threads(),
            x=x.data_ptr(),
            adapters=ctypes.addressof(adapters),
            num_adapters=len(adapters),
        )
        model, where = ctypes.addressof(self._model), ctypes.addressof(step)
        if on_layer is None:
            check(self._run(model, where, self._own.start, self._own.stop))
            return x
        for layer in self._own:
            check(self._run(model, where, layer, layer + 1))
            on_layer(layer)
        return x

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply RMSNorm to rows x [R, hidden_size], contiguous."""
        out, model = torch.empty_like(x), ctypes.addressof(self._model)
        self._norm(model, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads())
        return out


def fuse(
    spec: ModelSpec,
    layers: Sequence[Layer | None],
    attention: Attention,
    ropes: Sequence[Rope],
    collectives: Collectives | None = None,
    adapted: bool = False,
) -> tuple[FusedLayers | GpuLayers | None, dict[str, str]]:
    """Return what runs these layers faster than torch, or None, and the reason against each other way. `adapted`:
    adapters may add to them."""
    reasons = {"fused": FusedLayers.unfit(spec, layers, attention)}
    if not reasons["fused"]:
        return FusedLayers(spec, layers, attention, ropes, collectives), {"torch": "fused was chosen"}
    if attention.shape.device.type == "cpu" and attention.name not in INTERPRETED_ATTENTION:
        return None, reasons
    if reason := "adapters add to the layers" if adapted else GpuLayers.unfit(spec, layers, attention):
        return None, reasons | {"triton": reason}
    return GpuLayers(spec, layers, attention, ropes), reasons


def _linears(layer: Layer) -> list[LinearKernel]:
    parts = [layer.qkv, layer.output]
    if (experts := layer.experts) is None:
        return [*parts, layer.gate_up, layer.down]
    shared = [part for part in (experts.shared_gate_up, experts.shared_down) if part is not None]
    own = [kernel for kernel in (*experts.gate_up, *experts.down) if kernel is not None]
    return [*parts, experts.router, *own, *shared]


def _layer(layer: Layer | None, ropes: Sequence[Rope], rope: int | None, experts: _Experts | None) -> _Layer:
    if layer is None:
        return _Layer()
    linears = {name: _address(getattr(layer, name)) for name in LINEARS}
    cos, sin = (None, None) if rope is None else (table.data_ptr() for table in ropes[rope].signed_tables)
    return _Layer(
        **{name: _norm(getattr(layer, name)) for name in _NORMS}, **linears, cos=cos, sin=sin,
        experts=None if experts is None else ctypes.addressof(experts),
        output_sum=_row_parallel(layer.output), down_sum=_row_parallel(layer.down),
    )  # fmt: skip


def _row_parallel(part: LinearKernel | None) -> _RowParallel:
    if not isinstance(part, RowParallelLinear):
        return _RowParallel()
    return _RowParallel(*(None if value is None else value.data_ptr() for value in (part.bias, part.order)))


def _norm(norm: Norm | None) -> _Norm:
    if norm is None:
        return _Norm()
    if isinstance(norm, RMSNorm):
        return _Norm(norm.weight.data_ptr(), None, KINDS[norm.weight.dtype], 0)
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return _Norm(norm.weight.data_ptr(), bias, KINDS[norm.weight.dtype], norm.spec.kind == "layer")


def _experts(experts: Experts, shard: Shard) -> _Experts:
    """Return the struct, which holds the tables that it points at."""
    spec = experts.spec
    tables = [(_POINTER * spec.num_experts)(*map(_address, parts)) for parts in (experts.gate_up, experts.down)]
    down_sums = (_RowParallel * spec.num_experts)(*map(_row_parallel, experts.down))
    made = _Experts(
        spec.num_experts, spec.num_chosen, spec.renormalized,
        _padded(spec.intermediate_size) // (1 if shard.whole_experts else shard.degree),
        _padded(spec.shared_size) // shard.degree, shard.whole_experts,
        _address(experts.router), *map(ctypes.addressof, tables), _address(experts.shared_gate_up),
        _address(experts.shared_down), ctypes.addressof(down_sums), _row_parallel(experts.shared_down),
    )  # fmt: skip
    made.tables = [*tables, down_sums]  # kept alive as long as the struct
    return made


def _padded(size: int) -> int:
    """Round a size up to whole vectors, as activations need rows."""
    return size + -size % VECTOR_STRIDE


def _own(part: LinearKernel | None) -> LinearKernel | None:
    """Return the kernel that this process applies."""
    return part.part if isinstance(part, RowParallelLinear) else part


def _address(part: LinearKernel | None) -> int | None:
    """Return the address of a linear kernel's struct."""
    own = _own(part)
    return own.address if isinstance(own, PackedLinear) else None
