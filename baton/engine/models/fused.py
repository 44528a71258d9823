"""All layers of a step in one C call (native/fused.cpp), where everything they are made of is native."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine import native
from baton.engine.attention.base import Attention
from baton.engine.attention.native import KINDS, NativeAttention
from baton.engine.core.batch import ForwardBatch
from baton.engine.core.model_spec import ModelSpec
from baton.engine.kv.pool import KVPool
from baton.engine.layers.activation import VECTOR_STRIDE
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.rope import Rope
from baton.engine.models.gpu_layers import INTERPRETED, GpuLayers
from baton.engine.models.layer import Layer

ROW_MULTIPLE = 16  # a row of the residual stream is whole vectors
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_LAYER = ("input_norm", "qkv", "q_norm", "k_norm", "output", "mlp_norm", "gate_up", "down")


class _Layer(ctypes.Structure):
    """`Layer` of native/fused.h."""

    _fields_ = [(name, _POINTER) for name in _LAYER]


class _Model(ctypes.Structure):
    """`Model` of native/fused.h."""

    _fields_ = [
        *((name, _INT) for name in ("kind", "hidden_size", "intermediate_size")),
        *((name, _POINTER) for name in ("cos", "sin", "layers", "shape")),
        ("eps", ctypes.c_double),
    ]


class _Step(ctypes.Structure):
    """`Step` of native/fused.h."""

    _fields_ = [
        ("pool", _POINTER),
        ("seqs", _POINTER),
        ("num_seqs", _INT),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("num_tokens", _INT),
        ("num_threads", _INT),
        ("x", _POINTER),
    ]


class FusedLayers:
    """The layers of one model as the kernel takes them. Rows are independent of what shares their batch."""

    name = "fused"

    def __init__(self, spec: ModelSpec, layers: Sequence[Layer], attention: NativeAttention, ropes: Sequence[Rope]):
        """All linear layers are PackedLinear; `unfit` has said so."""
        self._attention = attention
        self._held = (layers, ropes)  # what the structs below point at
        self._layers = (_Layer * len(layers))(*(_Layer(*map(_address, _parts(layer))) for layer in layers))
        cos, sin = ropes[0].signed_tables
        self._model = _Model(
            kind=KINDS[attention.shape.dtype],
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size + -spec.intermediate_size % VECTOR_STRIDE,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            layers=ctypes.addressof(self._layers),
            shape=attention.native_shape.buffer_info()[0],
            eps=spec.norm.eps,
        )
        library = native.library()
        self._run = library.function("baton_layers", _POINTER, _POINTER, _INT, _INT)
        self._norm = library.function("baton_norm", _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)

    @property
    def address(self) -> int:
        """Return the address of the model's struct, for native code that runs the layers."""
        return ctypes.addressof(self._model)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @staticmethod
    def unfit(spec: ModelSpec, layers: Sequence[Layer], attention: Attention) -> str:
        """Return why a model's layers cannot be run this way; "" if they can."""
        if not isinstance(attention, NativeAttention):
            return f"attention is {attention.name}"
        if reason := spec.beyond_llama():
            return reason
        for layer in layers:
            for part in (layer.qkv, layer.output, layer.gate_up, layer.down):
                if not isinstance(part, PackedLinear):
                    return f"a linear kernel is {part.name}"
        if spec.hidden_size % ROW_MULTIPLE:
            return f"hidden size {spec.hidden_size} is not a multiple of {ROW_MULTIPLE}"
        return ""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """x [T, hidden_size], embedded, is changed in place and returned; KV of all layers is written.

        `on_layer(layer)` is called as each layer's KV is there, at the end of that layer.
        """
        plan = self._attention.plan(batch, pool)
        step = _Step(
            pool=ctypes.addressof(plan.pool),
            seqs=plan.address,
            num_seqs=len(batch.seqs),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            num_tokens=x.shape[0],
            num_threads=torch.get_num_threads(),
            x=x.data_ptr(),
        )
        model, where, num_layers = ctypes.addressof(self._model), ctypes.addressof(step), len(self._layers)
        if on_layer is None:
            self._run(model, where, 0, num_layers)
            return x
        for layer in range(num_layers):
            self._run(model, where, layer, layer + 1)
            on_layer(layer)
        return x

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of rows x [R, hidden_size], contiguous."""
        out, model = torch.empty_like(x), ctypes.addressof(self._model)
        self._norm(model, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads())
        return out


def fuse(
    spec: ModelSpec, layers: Sequence[Layer], attention: Attention, ropes: Sequence[Rope]
) -> tuple[FusedLayers | GpuLayers | None, dict[str, str]]:
    """Return what runs these layers faster than torch, or None; and the reason against each other way."""
    reasons = {"fused": FusedLayers.unfit(spec, layers, attention)}
    if not reasons["fused"]:
        return FusedLayers(spec, layers, attention, ropes), {"torch": "fused was chosen"}
    if attention.shape.device.type == "cpu" and attention.name not in INTERPRETED:
        return None, reasons
    if reason := GpuLayers.unfit(spec, layers, attention):
        return None, reasons | {"triton": reason}
    return GpuLayers(spec, layers, attention, ropes), reasons


def _parts(layer: Layer) -> list:
    return [getattr(layer, name) for name in _LAYER]


def _address(part) -> int | None:
    """Return the address of a norm's weight, or of a linear kernel's struct."""
    if part is None:
        return None
    return part.address if isinstance(part, PackedLinear) else part.weight.data_ptr()
