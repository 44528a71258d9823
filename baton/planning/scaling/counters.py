"""What the scaler sees of a fleet each minute. A missing counter is NaN, so that it is not taken for zero."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from baton.protocol import ROLES

NAN = math.nan


class FleetCounters(NamedTuple):
    """Counters of about the last minute. `starting` are workers that do not serve yet, or have served so shortly that
    their figures are those of the start. Ratios: seconds that prompts and tokens took, over what the model
    predicted."""

    at_s: float
    requests_per_s: float
    prompt_tokens: float  # per request, without those found in a cache
    output_tokens: float  # per request
    num_waiting: float = 0.0
    ttft_p95_s: float = NAN
    tpot_p95_s: float = NAN
    read_ratio: float = NAN
    write_ratio: float = NAN
    serving: Mapping[str, int] = dict.fromkeys(ROLES, 0)
    starting: Mapping[str, int] = dict.fromkeys(ROLES, 0)
    num_silent: int = 0  # gateways that did not answer, whose load is missing in these counters


class Placed(NamedTuple):
    """A worker as its launcher knows it; `address` is empty until it is known."""

    role: str
    address: str


def is_number(value: float) -> bool:
    """Return whether a counter has a value: finite and not negative."""
    return math.isfinite(value) and value >= 0
