"""Attach to a sequence that still decodes on a worker, or is parked there, instead of starting it over.

session lost ─► the worker answers Hello again ─ Attach ─► Granted: tokens continue    NotHere, lost, or no answer
client resumes ─ Attach to decode workers ───────────────► Granted, the first one      in ATTACH_WAIT_S: start over
"""

from collections.abc import Iterable

from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.attempts.attempt import new_key
from gateway.link.mailbox import Mailbox
from gateway.link.worker_leg import WorkerLeg
from gateway.link.worker_link import WorkerLink

ATTACH_WAIT_S = 0.5  # a worker answers from memory, and the client waits
MAX_ASKED = 32  # decode workers, those with the longest prefixes first


class Reattach:
    """Look for one sequence on workers, with one leg for each that is asked."""

    def __init__(self, key_id: str, mailbox: Mailbox, attach: pb.Attach, deadline: float):
        """`attach`: what the workers are asked, but for the key and the time; `deadline`: time.monotonic()."""
        self._key_id, self._mailbox, self._attach, self._deadline = key_id, mailbox, attach, deadline
        self._legs: dict[WorkerLeg, bytes] = {}  # to the id of the worker that is meant

    def __contains__(self, leg: WorkerLeg | None) -> bool:
        return leg in self._legs

    @property
    def is_exhausted(self) -> bool:
        """Return whether no worker is left to answer."""
        return not self._legs

    def ask(self, links: Iterable[WorkerLink], num_received: int) -> None:
        """Send Attach to each worker. The `num_received` tokens that the client has come again at once: they do not
        count as unread."""
        for link in links:
            self._send(self._open(link, link.worker_id, num_received))

    def wait_for(self, link: WorkerLink, worker_id: bytes) -> None:
        """Send Attach to the worker whose session was lost, once it is back: its leg gets Rejoined, or Lost again."""
        leg = self._open(link, worker_id)
        if link.hello is not None:
            self.send_again(leg)

    def send_again(self, leg: WorkerLeg) -> None:
        """Send Attach again, unless another worker answers at the same address: it knows nothing."""
        if leg.link.worker_id == self._legs[leg]:
            self._send(leg)
        else:
            self.drop(leg)

    def drop(self, leg: WorkerLeg) -> None:
        """Give up on this worker."""
        del self._legs[leg]
        leg.close()

    def take(self, leg: WorkerLeg) -> WorkerLeg:
        """Return the leg of the worker that continues, after closing all others."""
        del self._legs[leg]
        self.close()
        leg.worker_id = leg.link.worker_id
        return leg

    def close(self) -> None:
        """Close all legs. Idempotent."""
        for leg in list(self._legs):
            self.drop(leg)

    def _open(self, link: WorkerLink, worker_id: bytes, num_received: int = 0) -> WorkerLeg:
        """Return a leg. Beside the tokens that the client has, those come at once that were written while nobody could
        read them: they have a bound of their own."""
        leg = link.open(new_key(self._key_id), self._mailbox)
        leg.num_unread = -num_received - link.max_unread_tokens
        self._legs[leg] = worker_id
        return leg

    def _send(self, leg: WorkerLeg) -> None:
        self._attach.budget_ms = budget_ms(self._deadline)
        leg.send(attach=self._attach)
