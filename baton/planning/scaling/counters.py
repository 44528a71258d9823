"""What the scaler sees of a fleet in a minute. A counter that is missing is NaN, and never passes for zero."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from baton.protocol import ROLES

NAN = math.nan


class FleetCounters(NamedTuple):
    """Of the last minute or so; `starting` are workers that do not serve yet, or have served for so short a time that
    what they show is their start. Ratios: seconds that prompts and tokens took, over what the model said of them."""

    at_s: float
    requests_per_s: float
    prompt_tokens: float  # a request, those found in a cache aside
    output_tokens: float  # a request
    num_waiting: float = 0.0
    ttft_p95_s: float = NAN
    tpot_p95_s: float = NAN
    read_ratio: float = NAN
    write_ratio: float = NAN
    serving: Mapping[str, int] = dict.fromkeys(ROLES, 0)
    starting: Mapping[str, int] = dict.fromkeys(ROLES, 0)
    num_silent: int = 0  # gateways whose part of the load is not in it, as they did not answer


class Placed(NamedTuple):
    """A worker as what started it knows it; `address` is empty before it is known."""

    role: str
    address: str


def is_number(value: float) -> bool:
    """Return whether a counter says something: finite, and not below zero."""
    return math.isfinite(value) and value >= 0
