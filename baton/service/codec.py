"""Between protobuf and plain values: what gateway and worker both need."""

import time

from baton.v1 import worker_pb2 as pb

_MAX_BUDGET_MS = (1 << 32) - 1


def key_from_proto(key: pb.Key) -> tuple[str, int]:
    """(request_id, attempt)."""
    return key.request_id, key.attempt


def key_to_proto(key: tuple[str, int]) -> pb.Key:
    """Return the message of a key (request_id, attempt)."""
    return pb.Key(request_id=key[0], attempt=key[1])


def budget_ms(deadline: float) -> int:
    """Milliseconds left until `deadline` (time.monotonic()), 0 when it has passed. Only durations cross a process
    border: clocks differ."""
    left_s = deadline - time.monotonic()
    return max(0, min(_MAX_BUDGET_MS, int(left_s * 1000))) if left_s < _MAX_BUDGET_MS / 1000 else _MAX_BUDGET_MS


def deadline_of(budget_ms: int) -> float:
    """The deadline on this process's monotonic clock for a budget received now."""
    return time.monotonic() + budget_ms / 1000
