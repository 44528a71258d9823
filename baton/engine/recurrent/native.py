"""What native kernels of layers with a state take: structs, and the sizes that they can compute with."""

import ctypes

from torch import Tensor

from baton.engine import native
from baton.engine.core.state_spec import StateSpec

VECTOR = 16  # elements
POINTER, INT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Convolution(ctypes.Structure):
    """`Convolution` of native/layers/recurrent.h."""

    _fields_ = [
        *((name, INT) for name in ("kind", "first", "size", "taps", "row_size", "num_scalars", "first_scalar")),
        *((name, POINTER) for name in ("weight", "bias")),
    ]


def convolution(spec: StateSpec, kind: int, weight: Tensor, bias: Tensor | None) -> Convolution:
    """Return the struct of weight [taps, channels] and bias [channels], which must live as long; `kind`: of rows."""
    return Convolution(
        kind, spec.inner_size, spec.conv_size, spec.taps, spec.projected_size, spec.num_scalars,
        spec.inner_size + spec.conv_size, address(weight), address(bias),
    )  # fmt: skip


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def odd_size(**sizes: int) -> str:
    """Return why native kernels cannot compute with these sizes, by name; "" if they can."""
    if native.library() is None:
        return native.reason()
    return next((f"{name} {size} is not a multiple of {VECTOR}" for name, size in sizes.items() if size % VECTOR), "")
