"""The arguments of native kernels for layers with a state: structs, and the sizes that they support."""

import ctypes

from torch import Tensor

from baton.engine import native
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.state_part import StatePart

VECTOR = 16  # elements
POINTER, INT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Convolution(ctypes.Structure):
    """Mirror `Convolution` of native/layers/recurrent.h."""

    _fields_ = [
        *((name, INT) for name in ("kind", "first", "size", "taps", "row_size", "num_scalars", "first_scalar")),
        *((name, POINTER) for name in ("weight", "bias")),
        ("tail_size", INT), ("run_first", 3 * INT), ("run_size", 3 * INT), ("recurrence", INT),
    ]  # fmt: skip


class Meeting(ctypes.Structure):
    """Mirror `Meeting` of native/layers/recurrent.h."""

    _fields_ = [("ranks", POINTER), ("span", INT)]


def convolution(part: StatePart, kind: int, weight: Tensor, bias: Tensor | None) -> Convolution:
    """Return the struct of weight [taps, channels] and bias [channels], which must outlive it; `kind`: dtype of
    rows."""
    spec, runs = part.spec, part.channel_runs
    firsts, sizes = (3 * INT)(*(run.start for run in runs)), (3 * INT)(*map(len, runs))
    return Convolution(
        kind, spec.inner_size, spec.conv_size, spec.taps, spec.projected_size, spec.num_scalars,
        spec.inner_size + spec.conv_size, address(weight), address(bias), part.whole.conv_size, firsts, sizes,
        part.first_element,
    )  # fmt: skip


def meeting(part: StatePart, collectives: Collectives | None, span: int = 1) -> Meeting:
    """Return the struct of ranks, of which `span` neighbours share a norm; `collectives` must outlive it."""
    if collectives is None or (span == 1 and not part.shares_channels):
        return Meeting(None, 1)
    return Meeting(collectives.address, span)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's memory; None for None."""
    return None if tensor is None else tensor.data_ptr()


def unfit_sizes(**sizes: int) -> str:
    """Return why native kernels cannot compute with these named sizes; "" if they can."""
    if native.library() is None:
        return native.unavailable()
    return next((f"{name} {size} is not a multiple of {VECTOR}" for name, size in sizes.items() if size % VECTOR), "")
