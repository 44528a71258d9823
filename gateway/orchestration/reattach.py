"""Going on with a sequence that decodes somewhere, or is parked there, in place of beginning anew.

session lost ─► the worker answers Hello again ─ Attach ─► Granted: tokens go on     NotHere, lost, or no word
client resumes ─ Attach to decode workers ───────────────► Granted, the first one    within ATTACH_WAIT_S: anew
"""

from collections.abc import Callable, Iterable, Sequence

from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Mailbox
from gateway.link.worker_leg import Key, WorkerLeg
from gateway.link.worker_link import WorkerLink

ATTACH_WAIT_S = 0.5  # it is answered from what the worker remembers, and the client waits
MAX_ASKED = 32  # of the decode workers, those with the longest prefixes first


class Attaching:
    """One search. `next_index`: per choice, the first output token that is wanted."""

    def __init__(
        self, spec: pb.RequestSpec, next_index: Sequence[int], deadline: float, next_key: Callable[[], Key],
        mailbox: Mailbox, previous_attempt: int = 0,
    ):  # fmt: skip
        """`previous_attempt`: by which number the sequence is known there; 0: any of the request."""
        self._spec, self._next_index, self._deadline = spec, list(next_index), deadline
        self._next_key, self._mailbox = next_key, mailbox
        self._previous_attempt = previous_attempt
        self._legs: dict[WorkerLeg, bytes] = {}  # with the worker that is meant

    def __contains__(self, leg: WorkerLeg | None) -> bool:
        return leg in self._legs

    @property
    def is_empty(self) -> bool:
        return not self._legs

    def ask(self, links: Iterable[WorkerLink], num_received: int) -> None:
        """What the client has of the answer comes again, and all at once: it does not count as unread."""
        for link in links:
            leg = link.open(self._next_key(), self._mailbox)
            leg.num_unread = -num_received - link.max_unread_tokens
            self._legs[leg] = link.worker_id
            self._send(leg)

    def wait_for(self, link: WorkerLink, worker_id: bytes) -> None:
        """Its session was lost; the leg hears Rejoined, or Lost again, unless it is back already."""
        leg = link.open(self._next_key(), self._mailbox)
        self._legs[leg] = worker_id
        if link.hello is not None:
            self.rejoined(leg)

    def rejoined(self, leg: WorkerLeg) -> None:
        """Another worker at the same address knows nothing."""
        if leg.link.worker_id == self._legs[leg]:
            self._send(leg)
        else:
            self.drop(leg)

    def drop(self, leg: WorkerLeg) -> None:
        del self._legs[leg]
        leg.close()

    def take(self, leg: WorkerLeg) -> WorkerLeg:
        """The one that goes on; all others are given up."""
        del self._legs[leg]
        self.close()
        leg.worker_id = leg.link.worker_id
        return leg

    def close(self) -> None:
        for leg in list(self._legs):
            self.drop(leg)

    def _send(self, leg: WorkerLeg) -> None:
        attach = pb.Attach(
            previous_attempt=self._previous_attempt,
            next_index=self._next_index,
            budget_ms=budget_ms(self._deadline),
            fingerprint=self._spec.fingerprint,
            traceparent=self._spec.traceparent,
        )
        leg.send(attach=attach)
