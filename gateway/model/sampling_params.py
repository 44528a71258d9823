"""Every number of `Sampling`, once: its default, and which values mean something in a request as in a model's
generation_config.json. A field that is not listed takes any value of its type."""

import math
from collections.abc import Callable
from typing import NamedTuple

# Beyond these a logit in fp32 becomes infinite somewhere on its way, and what is drawn from it means nothing.
_MIN_SCALE, _MAX_SCALE = 1e-3, 100.0
_MAX_SHIFT = 1000.0  # penalties and biases that are added to a logit


class SamplingRange(NamedTuple):
    """The values that a parameter may have: `rule` ends a sentence that begins with its name."""

    holds: Callable[[float], bool]
    rule: str

    def problem(self, value: float) -> str | None:
        """Return what is wrong with `value`, for a sentence that begins with its name, or None."""
        if not -math.inf < value < math.inf:
            return "must be a finite number"
        return None if self.holds(value) else self.rule


class SamplingParam(NamedTuple):
    """`default` is without effect. A model's generation_config.json may name another one if `in_model`."""

    default: float
    range: SamplingRange
    in_model: bool = True


_SCALE = f"{_MIN_SCALE} to {_MAX_SCALE}"
_COUNT = SamplingRange(lambda v: v >= 0, "must be at least 0")
SHIFT = SamplingRange(lambda v: abs(v) <= _MAX_SHIFT, f"must be {-_MAX_SHIFT:g} to {_MAX_SHIFT:g}")
SAMPLING_PARAMS = {
    "temperature": SamplingParam(
        0.0, SamplingRange(lambda v: v == 0 or _MIN_SCALE <= v <= _MAX_SCALE, f"must be 0, or {_SCALE}")
    ),
    "top_k": SamplingParam(0, _COUNT),
    "top_p": SamplingParam(1.0, SamplingRange(lambda v: 0 < v <= 1, "must be in (0, 1]")),
    "min_p": SamplingParam(0.0, SamplingRange(lambda v: 0 <= v <= 1, "must be in [0, 1]")),
    "repetition_penalty": SamplingParam(
        1.0, SamplingRange(lambda v: _MIN_SCALE <= v <= _MAX_SCALE, f"must be {_SCALE}")
    ),
    "presence_penalty": SamplingParam(0.0, SHIFT, in_model=False),
    "frequency_penalty": SamplingParam(0.0, SHIFT, in_model=False),
}
SAMPLING_DEFAULTS = {name: param.default for name, param in SAMPLING_PARAMS.items()}
