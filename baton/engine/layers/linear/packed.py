"""Packed weights applied by the native kernels (engine/native/linear/), one C call a layer.

Rows are independent by construction: an output's sum takes its inputs in one order, whatever the number of rows or of
threads.

Integer weights meet int8 activations, so that the products are integers (VNNI) and their sums exact:
- activations "dynamic": one scale per row, as the form says.
- activations "none" (weight-only forms): one scale per row and group of inputs (per 128 inputs where the weight has
  longer groups or none), as llama.cpp does; the rounding costs about 1/254 of a group's largest value. Widening the
  weights to bf16 instead halves the speed of a long prompt and changes logits less than the weights' own rounding.
Floating-point weights meet bf16 (or fp32) activations and are summed in fp32.
"""

import ctypes
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine import native
from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.panels import (
    E4M3_PER_ROW,
    INT8_PER_ROW,
    PANEL,
    SCALE_KINDS,
    Panels,
    pack,
    unfit_for_panels,
)
from baton.engine.weights.forms import Weight

X_KINDS = {torch.float32: 0, torch.bfloat16: 1}
ARGUMENTS = (*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64)  # of baton_linear


class _Linear(ctypes.Structure):
    """Mirror `struct Linear` of native/linear/linear.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "scales", "offsets", "bias", "order")),
        *((name, ctypes.c_void_p) for name in ("outlier_columns", "outlier_values")),
        *((name, ctypes.c_int64) for name in ("num_outliers", "num_out", "num_in", "padded_in", "group", "num_groups")),
        *((name, ctypes.c_int64) for name in ("groups_per_scale", "num_scales", "kind", "scale_kind", "activations")),
        *((name, ctypes.c_int64) for name in ("x_kind", "y_kind", "num_leaves")),
        ("input_scale", ctypes.c_float),
    ]


@cache
def _apply():
    return native.library().function("baton_linear", *ARGUMENTS)


def unavailable() -> str:
    """Return why this machine has no native linear kernels; "" if it has them."""
    return native.unavailable()


class PackedLinear(LinearKernel):
    """Apply one packed weight of any form."""

    name = "native"
    batch_invariant = True
    row_multiple = 1

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, leaves: int = 1, partial: bool = False):
        """Pack weight [out_features, in_features] with bias [out_features]; dtype of x and y: fp32 or bf16."""
        self._panels = panels = pack(weight, dtype, leaves)
        self._bias = None if bias is None else F.pad(bias.float(), (0, -bias.shape[0] % PANEL)).contiguous()
        self._num_out, self._dtype = panels.num_out, dtype
        self._dtype_of_y = torch.float32 if partial else dtype
        self.scaled_by_row = panels.activations in (INT8_PER_ROW, E4M3_PER_ROW)

        num_groups = panels.padded_in // panels.group

        def address(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        self._struct = _Linear(
            values=address(panels.values),
            scales=address(panels.scales),
            offsets=address(panels.offsets),
            bias=address(self._bias),
            order=address(panels.order),
            outlier_columns=address(panels.outlier_columns),
            outlier_values=address(panels.outlier_values),
            num_outliers=0 if panels.outlier_columns is None else panels.outlier_columns.numel(),
            num_out=panels.num_out,
            num_in=panels.num_in,
            padded_in=panels.padded_in,
            group=panels.group,
            num_groups=num_groups,
            groups_per_scale=panels.groups_per_scale,
            num_scales=-(-num_groups // panels.groups_per_scale),
            kind=panels.kind,
            scale_kind=0 if panels.scales is None else SCALE_KINDS.index(panels.scales.dtype),
            activations=panels.activations,
            x_kind=X_KINDS[dtype],
            y_kind=X_KINDS[self._dtype_of_y],
            num_leaves=leaves,
            input_scale=panels.input_scale,
        )
        # For native code that calls the kernel itself.
        self.address, self._apply = ctypes.addressof(self._struct), _apply()

    @property
    def num_bytes(self) -> int:
        return self._panels.num_bytes + (0 if self._bias is None else self._bias.nbytes)

    @property
    def panels(self) -> Panels:
        """Return the weight as the kernel reads it."""
        return self._panels

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        num_rows, num_in = x.shape
        assert num_in == self._struct.num_in and x.dtype == self._dtype, "the kernel reads what lies there"
        y = x.new_empty(num_rows, self._num_out, dtype=self._dtype_of_y)
        given = None if largest is None else largest.data_ptr()
        self._apply(self.address, x.data_ptr(), given, y.data_ptr(), num_rows, torch.get_num_threads())
        return y


def unfit(weight: Weight, dtype: torch.dtype) -> str:
    """Return why there is no native kernel for this weight here; "" if there is one."""
    return unavailable() or unfit_for_panels(weight, dtype)
