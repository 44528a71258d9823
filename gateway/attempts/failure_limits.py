"""Bound the failures of one request, and say which error a failed worker brings its client."""

import grpc

from baton.protocol import DRAINING
from baton.service.errors import BatonError, Unavailable, from_code
from baton.v1 import worker_pb2 as pb
from gateway.attempts.retry_throttle import RetryThrottle, poison_error
from gateway.attempts.suspected_deaths import MAX_DEATHS, STALLED, SuspectedDeaths
from gateway.link.mailbox import Lost
from gateway.link.worker_link import WorkerLink

MAX_BARREN = 4  # attempts in a row that decoded nothing
FINAL_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED)  # of errors that end the request


class FailureLimits:
    """Limit the failures of one request: few workers may die of it, few attempts in a row may decode nothing, and
    retries are taken from the throttle that all requests share."""

    __slots__ = ("deaths", "_throttle", "_prompt_digest", "_num_barren")

    def __init__(self, throttle: RetryThrottle, prompt_digest: bytes):
        """`prompt_digest` identifies the prompt if it must be quarantined because workers died of it."""
        self.deaths = SuspectedDeaths()
        self._throttle, self._prompt_digest, self._num_barren = throttle, prompt_digest, 0

    def note_death(self, message: object, link: WorkerLink, worker_id: bytes) -> None:
        """Count the worker as one that died of the request if `message`, its last one, says so."""
        if isinstance(message, Lost) or is_stalled(message):
            self.deaths.suspect(link, worker_id)
        elif isinstance(message, pb.Ended):
            self.deaths.note_reported(message.reason)

    def check_deaths(self) -> bool:
        """Return whether another worker may get the prompt now; False: first see whether a lost worker comes back.

        Raises BatonError (POISON) if the prompt is to blame for dead workers."""
        if not self.deaths.exceed_limit:
            return True
        if not self.deaths.are_final:
            return False
        self._throttle.quarantine(self._prompt_digest)
        raise poison_error(f"{MAX_DEATHS} workers died while they served this request")

    def spend_retry(self, error: BatonError, has_stepped: bool = False, is_routed_around: bool = False) -> None:
        """Take one retry from the throttle, after an attempt that ended with `error`.

        The first retry is free if no other request is sent to the failed worker either (`is_routed_around`). Raises
        `error` after MAX_BARREN attempts in a row that decoded nothing, and Unavailable (RETRY_BUDGET) if no retry is
        left."""
        self._num_barren = 1 if has_stepped else self._num_barren + 1
        if self._num_barren >= MAX_BARREN:
            raise error
        if self._num_barren > 1 or not is_routed_around:
            self._throttle.spend(error)


def error_of(message: object, role: str, sent: str = "") -> BatonError:
    """Return the error for the client after the last message of a worker of `role`; None: the worker is silent.

    `sent` says how much of the answer the client has, as " after 3 tokens"."""
    if isinstance(message, pb.Ended) and message.code:
        return from_code(message.code, message.message, reason=message.reason or None)
    silent = "it ended early" if isinstance(message, (pb.Ended, pb.Done)) else "it gave no answer"
    what = message.reason if isinstance(message, Lost) else silent
    reason = f"{role.upper()}_WORKER_LOST"
    return Unavailable(f"{role} worker lost{sent}: {what}", retry_after_s=1.0, reason=reason)


def is_draining(message: object) -> bool:
    """Return whether a worker ended the request because the worker drains."""
    return isinstance(message, pb.Ended) and message.reason == DRAINING


def is_stalled(message: object) -> bool:
    """Return whether this gateway left the worker because its engine does not step."""
    return isinstance(message, pb.Ended) and message.reason == STALLED
