"""The workers that have refused or failed one request."""

from baton.v1 import worker_pb2 as pb
from gateway.fleet.router import Exclusions
from gateway.routing.routing import NEVER_HERE

_NONE: frozenset[bytes] = frozenset()


class TriedWorkers:
    """The workers that one request has tried, by their ids.

    `refused` have no room now. `failed` have failed the request; `leaving` are those among them that only drain, and
    may still give KV. `unable` have said that they can never take the request, and are not asked again."""

    __slots__ = ("refused", "failed", "leaving", "unable")

    def __init__(self) -> None:
        self.refused = self.failed = self.leaving = self.unable = _NONE

    @property
    def avoided(self) -> frozenset[bytes]:
        """Workers that are asked only after all others."""
        return self.failed | self.refused

    @property
    def exclusions(self) -> Exclusions:
        """The tried workers as the router takes them."""
        return Exclusions(self.avoided, self.unable)

    def note_refusal(self, worker_id: bytes, refused: pb.Refused) -> None:
        """Note that a worker has no room for the request, or can never take it."""
        self.refused |= {worker_id}
        if refused.reason in NEVER_HERE:
            self.unable |= {worker_id}

    def forget_refusals(self) -> None:
        """Let workers that refused be asked again, except those that can never take the request."""
        self.refused = _NONE

    def note_failure(self, worker_id: bytes, is_leaving: bool = False) -> None:
        """Note that a worker failed the request; `is_leaving`: only because the worker drains."""
        self.failed |= {worker_id}
        if is_leaving:
            self.leaving |= {worker_id}
