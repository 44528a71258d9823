"""Conversions between protobuf and plain values that gateways and workers share."""

import time

from baton.v1 import worker_pb2 as pb

_MAX_BUDGET_MS = (1 << 32) - 1


def key_from_proto(key: pb.Key) -> tuple[str, int]:
    """Return the key of a message: (request_id, attempt)."""
    return key.request_id, key.attempt


def key_to_proto(key: tuple[str, int]) -> pb.Key:
    """Return the message of a key (request_id, attempt)."""
    return pb.Key(request_id=key[0], attempt=key[1])


def budget_ms(deadline: float) -> int:
    """Return the milliseconds left until `deadline` (monotonic), 0 once it has passed. Processes send one another
    durations only, since their clocks differ."""
    left_s = deadline - time.monotonic()
    return max(0, min(_MAX_BUDGET_MS, int(left_s * 1000))) if left_s < _MAX_BUDGET_MS / 1000 else _MAX_BUDGET_MS


def deadline_of(budget_ms: int) -> float:
    """Return the deadline (monotonic) of a budget that is received now."""
    return time.monotonic() + budget_ms / 1000
