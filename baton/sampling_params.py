"""Declare every sampling parameter once: its type, its default, and its valid values, for requests and for a model's
generation_config.json. The protos name them too, and so do the samplers (baton/engine/sampling/). Plain Python."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, cast

# Beyond these bounds a logit in fp32 overflows at some point, and drawn tokens are meaningless.
_MIN_SCALE, _MAX_SCALE = 1e-3, 100.0
_MAX_SHIFT = 1000.0  # penalties and biases that are added to a logit


class SamplingRange(NamedTuple):
    """The values that a parameter may have; `rule` ends a sentence that begins with the parameter's name."""

    holds: Callable[[float], bool]
    rule: str

    def problem(self, value: float) -> str | None:
        """Return what is wrong with `value`, for a sentence that begins with the parameter's name, or None."""
        if not -math.inf < value < math.inf:
            return "must be a finite number"
        return None if self.holds(value) else self.rule


class SamplingParam(NamedTuple):
    """Describe a parameter. `default` has no effect on sampling. If `in_model`, a model's generation_config.json may
    name another default. If `in_traces`, traces have it as `gen_ai.request.NAME`, which OpenTelemetry's conventions
    define."""

    default: float
    range: SamplingRange
    in_model: bool
    in_traces: bool


def _within(
    holds: Callable[[float], bool], rule: str, in_model: bool = True, in_traces: bool = True
) -> Mapping[str, object]:
    return {"range": SamplingRange(holds, rule), "in_model": in_model, "in_traces": in_traces}


_SCALE = f"{_MIN_SCALE} to {_MAX_SCALE}"


def _is_shift(value: float) -> bool:
    return -_MAX_SHIFT <= value <= _MAX_SHIFT


def settle_temperature(value: float) -> float:
    """Return the temperature to draw with. One between 0 and the least valid value counts as 0: programs send 1e-8
    where other servers require more than 0."""
    return 0.0 if 0 < value < _MIN_SCALE else value


SHIFT = SamplingRange(_is_shift, f"must be {-_MAX_SHIFT:g} to {_MAX_SHIFT:g}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters by which the tokens of one request are drawn. All defaults are resolved; temperature 0 is greedy.
    Raises ValueError for a number outside its range."""

    temperature: float = field(
        default=0.0, metadata=_within(lambda v: v == 0 or _MIN_SCALE <= v <= _MAX_SCALE, f"must be 0, or {_SCALE}")
    )
    top_k: int = field(default=0, metadata=_within(lambda v: v >= 0, "must be at least 0"))  # 0: off
    top_p: float = field(default=1.0, metadata=_within(lambda v: 0 < v <= 1, "must be in (0, 1]"))
    min_p: float = field(default=0.0, metadata=_within(lambda v: 0 <= v <= 1, "must be in [0, 1]", in_traces=False))
    seed: int = 0
    repetition_penalty: float = field(
        default=1.0,
        metadata=_within(lambda v: _MIN_SCALE <= v <= _MAX_SCALE, f"must be {_SCALE}", in_traces=False),
    )
    presence_penalty: float = field(default=0.0, metadata=_within(*SHIFT, in_model=False))
    frequency_penalty: float = field(default=0.0, metadata=_within(*SHIFT, in_model=False))
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1  # choices
    logprobs: int | None = None  # of the drawn token and so many best ones; None: of none
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first

    def __post_init__(self):
        for name, param in SAMPLING_PARAMS.items():
            if problem := param.range.problem(value := getattr(self, name)):
                raise ValueError(f"sampling.{name} is {value:g}: {problem}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """Return whether tokens are filtered out before one is drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Return whether the tokens so far change the logits of the next."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


# The numbers with a range, by name; the other parameters accept every value of their types.
SAMPLING_PARAMS = {
    each.name: SamplingParam(cast(float, each.default), **each.metadata)
    for each in fields(SamplingParams)
    if each.metadata
}
SAMPLING_DEFAULTS = {name: param.default for name, param in SAMPLING_PARAMS.items()}
