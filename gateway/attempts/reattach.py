"""Attach to a sequence that a worker still decodes, or has parked, instead of computing it again.

session lost ─► the worker answers Hello again ─ Attach ─► Granted: tokens continue    NotHere, lost, or no answer
client resumes ─ Attach to decode workers ───────────────► Granted, the first one      in ATTACH_WAIT_S: start over
"""

from collections.abc import Iterable
from typing import NamedTuple

from baton.service.codec import budget_ms
from baton.v1 import worker_pb2 as pb
from gateway.attempts.attempt import new_key
from gateway.link.mailbox import Mailbox
from gateway.link.worker_leg import WorkerLeg
from gateway.link.worker_link import WorkerLink

ATTACH_WAIT_S = 0.5  # a worker answers from memory, and the client waits
MAX_ASKED = 32  # decode workers that are asked; those with the longest matching prefixes come first


class AttachReply(NamedTuple):
    """What came on a leg that asks a worker for a sequence."""

    leg: WorkerLeg
    message: object


class Reattach:
    """Look for one sequence on workers, with one leg for each worker that is asked."""

    def __init__(self, key_id: str, mailbox: Mailbox, attach: pb.Attach, deadline: float):
        """`attach`: the command to workers, without its key and budget; `deadline`: time.monotonic()."""
        self._key_id, self._mailbox, self._attach, self._deadline = key_id, mailbox, attach, deadline
        self._legs: dict[WorkerLeg, bytes] = {}  # leg -> id of the worker that may have the sequence

    def __contains__(self, leg: WorkerLeg | None) -> bool:
        return leg in self._legs

    @property
    def is_exhausted(self) -> bool:
        """Return whether no worker is left that could still answer."""
        return not self._legs

    def ask(self, links: Iterable[WorkerLink], num_received: int) -> None:
        """Send Attach to each worker. They send the `num_received` tokens that the client has once more, all together;
        these do not count as unread."""
        for link in links:
            self._send(self._open(link, link.worker_id, num_received))

    def wait_for(self, link: WorkerLink, worker_id: bytes) -> None:
        """Send Attach to a worker whose session was lost as soon as it is back; its leg gets Rejoined, or Lost
        again."""
        leg = self._open(link, worker_id)
        if link.hello is not None:
            self.send_again(leg)

    def send_again(self, leg: WorkerLeg) -> None:
        """Send Attach again, or give up if another worker, which cannot have the sequence, is now at the address."""
        if leg.link.worker_id == self._legs[leg]:
            self._send(leg)
        else:
            self.drop(leg)

    def drop(self, leg: WorkerLeg) -> None:
        """Give up on this worker."""
        del self._legs[leg]
        leg.close()

    def settle_on(self, leg: WorkerLeg) -> WorkerLeg:
        """Return `leg`, whose worker continues the sequence, after closing all other legs."""
        del self._legs[leg]
        self.close()
        leg.worker_id = leg.link.worker_id
        return leg

    def close(self) -> None:
        """Close all legs. Idempotent."""
        for leg in list(self._legs):
            self.drop(leg)

    def _open(self, link: WorkerLink, worker_id: bytes, num_received: int = 0) -> WorkerLeg:
        """Return a new leg on `link`.

        Its first message has the tokens that the client has, and those written while nobody could read them. Both may
        exceed the bound of unread tokens."""
        leg = link.open(new_key(self._key_id), self._mailbox)
        leg.num_unread = -num_received - link.max_unread_tokens
        self._legs[leg] = worker_id
        return leg

    def _send(self, leg: WorkerLeg) -> None:
        self._attach.budget_ms = budget_ms(self._deadline)
        leg.send(attach=self._attach)
