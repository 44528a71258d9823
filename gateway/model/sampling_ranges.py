"""Which numbers of sampling mean something, in a request as in a model's generation_config.json."""

import math
from collections.abc import Callable
from typing import NamedTuple

# Beyond these a logit in fp32 becomes infinite somewhere on its way, and what is drawn from it means nothing.
_MIN_SCALE, _MAX_SCALE = 1e-3, 100.0
_MAX_SHIFT = 1000.0  # penalties and biases that are added to a logit


class SamplingRange(NamedTuple):
    holds: Callable[[float], bool]
    rule: str

    def problem(self, value: float) -> str | None:
        """What is wrong with a number, for a sentence that begins with its name."""
        if not -math.inf < value < math.inf:
            return "must be a finite number"
        return None if self.holds(value) else self.rule


_SCALE = f"{_MIN_SCALE} to {_MAX_SCALE}"
SHIFT = SamplingRange(lambda v: abs(v) <= _MAX_SHIFT, f"must be {-_MAX_SHIFT:g} to {_MAX_SHIFT:g}")
RANGES = {
    "temperature": SamplingRange(lambda v: v == 0 or _MIN_SCALE <= v <= _MAX_SCALE, f"must be 0, or {_SCALE}"),
    "top_p": SamplingRange(lambda v: 0 < v <= 1, "must be in (0, 1]"),
    "min_p": SamplingRange(lambda v: 0 <= v <= 1, "must be in [0, 1]"),
    "repetition_penalty": SamplingRange(lambda v: _MIN_SCALE <= v <= _MAX_SCALE, f"must be {_SCALE}"),
    "presence_penalty": SHIFT,
    "frequency_penalty": SHIFT,
}
