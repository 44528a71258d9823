"""Limit the retries of all requests of one model version.

A failure must not become a storm of retries, and one prompt must not kill every worker. Each request adds a tenth of a
retry to a bucket, and each retry takes one out, as in gRPC's retryThrottling (gRFC A6).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import grpc

from baton.service.clock import now
from baton.service.errors import BatonError, Unavailable, from_code

_RATIO = 0.1  # the part of a retry that each request adds
_MOST_RETRIES = 100.0  # that the bucket holds
_QUARANTINE_S = 60.0  # how long a prompt is refused after two workers died of it
_MOST_PROMPTS = 1024


class RetryThrottle:
    """The retries that requests may still make, and the prompts that are quarantined. Belongs to the event loop."""

    def __init__(self) -> None:
        self.num_refused = 0  # retries that were refused because the bucket was empty
        self._num_left = _MOST_RETRIES
        self._poison: OrderedDict[bytes, float] = OrderedDict()  # digest of a prompt -> end of its quarantine

    def begin(self, prompt_digest: bytes) -> None:
        """Count a new request. Raises BatonError (ABORTED, POISON) if its prompt is quarantined."""
        self._num_left = min(_MOST_RETRIES, self._num_left + _RATIO)
        if (until := self._poison.get(prompt_digest)) is not None:
            if now() < until:
                raise poison_error("workers died of this prompt a moment ago")
            del self._poison[prompt_digest]

    def spend(self, error: BatonError) -> None:
        """Take one retry out of the bucket, after `error`. Raises Unavailable (RETRY_BUDGET) if the bucket is empty."""
        if self._num_left < 1:
            self.num_refused += 1
            raise Unavailable(f"{error.message}; too many requests are being retried", 1.0, reason="RETRY_BUDGET")
        self._num_left -= 1

    def quarantine(self, prompt_digest: bytes) -> None:
        """Refuse this prompt for _QUARANTINE_S."""
        self._poison[prompt_digest] = now() + _QUARANTINE_S
        while len(self._poison) > _MOST_PROMPTS:
            self._poison.popitem(last=False)


def prompt_digest(tenant: str, prompt_ids: Sequence[int]) -> bytes:
    """Return 32 bytes that identify the prompt of a tenant."""
    return hashlib.sha256(f"{tenant}/".encode() + array("I", prompt_ids).tobytes()).digest()


def poison_error(message: str) -> BatonError:
    """Return the error for a request whose prompt kills workers."""
    return from_code(grpc.StatusCode.ABORTED, message, reason="POISON")
