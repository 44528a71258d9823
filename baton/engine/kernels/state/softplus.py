"""The softplus function, which makes the steps of all recurrences."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) to the last places: log1p(e) = 2 atanh(e / (2 + e)) by its series, e = exp(-|x|) <= 1. The
    ninth term is below 2e-9 of the first."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    z2 = z * z
    series = 1.0 + z2 * (1 / 3 + z2 * (1 / 5 + z2 * (1 / 7 + z2 * (1 / 9 + z2 * (1 / 11 + z2 * (1 / 13 + z2 / 15))))))
    return tl.maximum(x, 0.0) + 2.0 * z * series
