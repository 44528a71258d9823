"""Make counter-based noise: a function of (seed, choice, position, token id) alone.

A token is drawn as argmax(score + Gumbel noise), so the token at a position is the same on every worker, alone or in a
batch, with or without speculation. The bits are those of SplitMix64, seeded with the key of (seed, choice, position),
at index token id. Integers wrap at 64 bits in Python as in torch.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def noise_key(seed: int, choice: int, position: int) -> int:
    """Return a key of 64 bits as a signed integer, which torch needs.

    `position`: the index in the whole sequence of the token being drawn.
    """
    key = _mix(seed & MASK)
    for part in (choice, position):
        key = _mix((key + GOLDEN * (part + 1)) & MASK)
    return _signed(key)


def uniform(keys: Tensor | int, token_ids: Tensor) -> Tensor:
    """Return uniform fp64 in (0, 1) with 53 random bits, in the broadcast shape of `keys` and `token_ids`.

    `keys`: [R, 1] or a scalar. `token_ids`: int64 [V] or [R, V].
    """
    x = (token_ids + 1) * _signed(GOLDEN) + keys
    x ^= _shifted(x, 30)
    x *= _signed(MIX_1)
    x ^= _shifted(x, 27)
    x *= _signed(MIX_2)
    x ^= _shifted(x, 31)
    return _shifted(x, 11).double().add_(0.5).mul_(2.0**-53)


def gumbel(uniforms: Tensor) -> Tensor:
    """Return Gumbel noise of uniforms [...], in their shape and precision.

    Small uniforms make the largest noise, since floats have the highest resolution near 0.
    """
    return torch.log1p(-uniforms).neg_().log_().neg_()


def _mix(x: int) -> int:
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x >> bits of the unsigned 64 bits; torch's own shift extends the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
