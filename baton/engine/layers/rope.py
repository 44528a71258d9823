"""Rotary position embedding. A token's rotation depends on its own position and the loaded model, never on what shares
its batch or on how long its sequence has become.

Two kinds need a choice, because transformers derives their frequencies from the longest sequence of the current call:

- dynamic (NTK): position p uses the base of a sequence of p + 1 tokens. This equals transformers within the original
  context, and beyond it for tokens that are decoded one by one.
- longrope: the served context decides once, at load: short factors if it is at most the original context (the default),
  long factors for all positions if it is larger. This equals transformers within the original context in the first
  case, and for sequences beyond it in the second.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.model_spec import RopeSpec, yarn_scale

BLOCK = 64  # rows of the tables that are computed together


class Rope:
    """Hold cosines and sines, fp32, of every position that can be served."""

    def __init__(self, spec: RopeSpec, head_dim: int, max_model_len: int):
        self.half = head_dim // 2
        size = spec.rotary_dim or head_dim
        self.variant = (f"rope-{longrope_side(spec, max_model_len)}",) if spec.kind == "longrope" else ()
        scale = attention_scale(spec)
        blocks = []
        # In blocks of a fixed size, so that a row's bits depend neither on the table's length nor on the number of
        # threads: vector and scalar code of cos, sin and pow differ in the last bit.
        for begin in range(0, max_model_len, BLOCK):
            positions = torch.arange(begin, begin + BLOCK, dtype=torch.float32).unsqueeze(1)
            angles = positions * frequencies(spec, size, positions, max_model_len)
            blocks.append(torch.stack((angles.cos() * scale, angles.sin() * scale)))
        cos, sin = torch.cat(blocks, dim=1)
        if still := self.half - size // 2:  # elements that are not rotated
            cos, sin = F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))
        self._cos = torch.cat((cos, cos), dim=1).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), dim=1).unsqueeze(1)

    def to(self, device: torch.device) -> "Rope":
        """Move the tables to a device; their bits are the same on all, since they are made on the CPU."""
        self._cos, self._sin = self._cos.to(device), self._sin.to(device)
        return self

    @property
    def signed_tables(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin, fp32 [positions, 1, head_dim], for both halves of a head; the first half of sin is
        negated."""
        return self._cos, self._sin

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [T, 1, head_dim] for positions int64 [T]; computed once per step for all layers."""
        return self._cos[positions].to(dtype), self._sin[positions].to(dtype)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, head_dim]: the first half of a head pairs with the second."""
        swapped = torch.cat((x[..., self.half :], x[..., : self.half]), dim=-1)
        return torch.addcmul(x * cos, swapped, sin)


def order_of_head(spec: RopeSpec, head_dim: int) -> list[int] | None:
    """Return the order in which to read a head's elements, so that the first half pairs with the second and elements
    that are not rotated come last in each half; None if they are in that order. Rows of q and k are reordered alike, so
    attention sums the same products."""
    size, half = spec.rotary_dim or head_dim, head_dim // 2
    turning = list(range(size))
    first, second = (turning[::2], turning[1::2]) if spec.interleaved else (turning[: size // 2], turning[size // 2 :])
    still = list(range(size, head_dim))
    middle = half - size // 2
    order = [*first, *still[:middle], *second, *still[middle:]]
    return None if order == list(range(head_dim)) else order


def frequencies(spec: RopeSpec, head_dim: int, positions: Tensor, max_model_len: int) -> Tensor:
    """Return the angle per position, fp32 [head_dim / 2], or [P, head_dim / 2] if positions [P, 1] have their own."""
    plain = 1.0 / _powers(spec.theta, head_dim)
    if spec.kind == "linear":
        return plain / spec.parameters["factor"]
    if spec.kind == "dynamic":
        return _dynamic(spec, head_dim, positions)
    if spec.kind == "yarn":
        return _yarn(spec, head_dim)
    if spec.kind == "longrope":
        return 1.0 / (_longrope_factors(spec, head_dim, max_model_len) * _powers(spec.theta, head_dim))
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    return plain


def attention_scale(spec: RopeSpec) -> float:
    """Return the factor on cosines and sines in yarn and longrope, which keeps the entropy of attention."""
    parameters = spec.parameters
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = _stretch(spec)
    if spec.kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(spec.original_context)) if factor > 1 else 1.0
    # As in SGLang, and in DeepSeek-R1-0528-Qwen3-8B, where the product is 1; transformers ignores it.
    more = parameters.get("attn_factor") or 1.0
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return more * yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return more * yarn_scale(factor, 1.0)


def _powers(base: float, head_dim: int) -> Tensor:
    return base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _stretch(spec: RopeSpec) -> float:
    return spec.parameters.get("factor") or spec.max_position_embeddings / spec.original_context


def _dynamic(spec: RopeSpec, head_dim: int, positions: Tensor) -> Tensor:
    """Return one row of frequencies per position: longer sequences get a larger base."""
    original, factor = spec.max_position_embeddings, spec.parameters["factor"]
    lengths = (positions + 1).clamp_(min=original)
    bases = spec.theta * (factor * lengths / original - (factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / bases ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def longrope_side(spec: RopeSpec, max_model_len: int) -> str:
    """Return which factors of longrope a served context uses: short or long."""
    return "long" if max_model_len > spec.original_context else "short"


def _longrope_factors(spec: RopeSpec, head_dim: int, max_model_len: int) -> Tensor:
    name = f"{longrope_side(spec, max_model_len)}_factor"
    factors = torch.tensor(spec.parameters[name], dtype=torch.float32)
    if factors.numel() != head_dim // 2:
        raise ValueError(f"{name} of longrope has {factors.numel()} entries, head_dim {head_dim} needs {head_dim // 2}")
    return factors


def _yarn(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return frequencies with fast dimensions kept, slow ones interpolated, and a ramp between."""
    parameters = spec.parameters

    def dimension_of(num_rotations: float) -> float:
        length = spec.original_context / (num_rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(spec.theta))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp_(0, 1)
    powers = _powers(spec.theta, head_dim)
    return (1.0 / (_stretch(spec) * powers)) * (1 - kept) + (1.0 / powers) * kept


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Return frequencies with wavelengths beyond the original context stretched, short ones kept, and a blend
    between."""
    factor = spec.parameters["factor"]
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    blend = (spec.original_context / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelength > spec.original_context / low, plain / factor, blended)
    return torch.where(wavelength < spec.original_context / high, plain, stretched)
