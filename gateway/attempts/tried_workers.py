"""The workers that one request has asked in vain."""

from baton.v1 import worker_pb2 as pb
from gateway.fleet.router import Exclusions
from gateway.routing.routing import NEVER_HERE

_NONE: frozenset[bytes] = frozenset()


class TriedWorkers:
    """Workers are named by their ids: `refused` have no room now, `failed` have failed this request, of which `leaving`
    only drain and may still give KV; `unable` have said that they can never take it, and are not asked again."""

    __slots__ = ("refused", "failed", "leaving", "unable")

    def __init__(self) -> None:
        self.refused = self.failed = self.leaving = self.unable = _NONE

    @property
    def avoided(self) -> frozenset[bytes]:
        """Those after which others are asked first."""
        return self.failed | self.refused

    @property
    def exclusions(self) -> Exclusions:
        """What the router is told of them."""
        return Exclusions(self.avoided, self.unable)

    def note_refusal(self, worker_id: bytes, refused: pb.Refused) -> None:
        """This worker has no room for the request, or says that it can never take it."""
        self.refused |= {worker_id}
        if refused.reason in NEVER_HERE:
            self.unable |= {worker_id}

    def forget_refusals(self) -> None:
        """Let every worker be asked again."""
        self.refused = _NONE

    def note_failure(self, worker_id: bytes, is_leaving: bool = False) -> None:
        """This worker has failed the request; if `is_leaving`, only because it drains."""
        self.failed |= {worker_id}
        if is_leaving:
            self.leaving |= {worker_id}
