"""The place of one request in the queues, while every worker of a role is full."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NoReturn

from baton.service.clock import now
from baton.service.errors import Overloaded
from baton.v1 import worker_pb2 as pb
from gateway.queue.waiting_queue import QueuedRequest, QueueEntry, WaitingQueue

_LEAST_HINT_S, _LONGEST_HINT_S = 0.02, 0.5
_WORKER_POLL_S = 0.05  # while no worker serves that could take over
_OTHERS_POLL_S = 1.0  # of those behind the first: a worker may suit them, and not the first


class QueuePlace:
    """A place in one queue at most. `on_room()` is called when it is first and there may be room."""

    __slots__ = (
        "_queued",
        "_on_room",
        "max_wait_s",
        "_entry",
        "_since",
        "_joined_at",
        "_retry_at",
        "_look_at",
        "_is_known",
        "waited_s",
    )

    def __init__(self, queued: QueuedRequest, on_room: Callable[[], None], max_wait_s: float):
        self._queued, self._on_room, self.max_wait_s = queued, on_room, max_wait_s
        self._entry: tuple[WaitingQueue, QueueEntry] | None = None
        self._since: float | None = None  # also where it has changed the line since
        self._joined_at = 0.0
        self._retry_at = 0.0
        self._look_at = math.inf
        self._is_known = False  # it has waited or run: how many wait is no reason to refuse it any more
        self.waited_s = defaultdict[str, float](float)  # in lines that it has left, by what was waited for there

    @property
    def is_in_line(self) -> bool:
        """Return whether it is in a queue."""
        return self._entry is not None

    @property
    def is_over(self) -> bool:
        """Return whether it has waited for `max_wait_s`."""
        return now() >= self._until

    @property
    def wake_at(self) -> float:
        """The time to try again without being called (time.monotonic()): at a worker's hint if it is first, else when
        it is over, or sooner where each waits for a worker that suits it."""
        is_first = self._entry is not None and self._entry[0].is_first(self._entry[1])
        return min(self._until, self._retry_at if is_first else self._look_at)

    def note_refusal(self, refused: pb.Refused) -> None:
        """Keep a worker's hint of when to try again."""
        self._retry_at = now() + min(max(refused.retry_after_ms / 1000, _LEAST_HINT_S), _LONGEST_HINT_S)

    def join(self, queue: WaitingQueue) -> None:
        """Join a queue, or stay in it after another refusal. From another one it brings the time that it has waited.
        Raises Overloaded: too many wait, where it has neither waited nor run before."""
        since = self._since or now()
        self._look_at = math.inf
        if self._entry is not None and self._entry[0] is queue:
            queue.call_next_tenant(self._entry[1])
            return
        self.leave(served=False)
        self._since, self._joined_at = since, now()
        self._retry_at = max(self._retry_at, now() + _LEAST_HINT_S)
        self._entry = queue, queue.join(self._queued, self._on_room, self._is_known)
        self._is_known = True

    def join_for_worker(self, queue: WaitingQueue) -> None:
        """Join a queue, or stay in it, though no worker serves that suits: it looks again by itself, soon if it is
        first. Raises Overloaded as `join` does."""
        self.join(queue)
        self._retry_at, self._look_at = now() + _WORKER_POLL_S, now() + _OTHERS_POLL_S

    def wait_longer(self, max_wait_s: float) -> bool:
        """Let it wait for as long; return whether that is longer than before."""
        is_longer = max_wait_s > self.max_wait_s
        self.max_wait_s = max(self.max_wait_s, max_wait_s)
        return is_longer

    def time_out(self) -> NoReturn:
        """Raises Overloaded: it has waited for as long as it may. Others may have been served meanwhile."""
        message = f"it waited in line for a worker with room for {self.max_wait_s:g} s"
        raise Overloaded(message, max(1.0, self.max_wait_s / 10), reason="QUEUE_WAIT")

    def leave(self, served: bool) -> None:
        """Leave the queue, if it is in one. `served`: a worker took the request."""
        if self._entry is not None:
            queue, entry = self._entry
            self.waited_s[queue.bottleneck] += now() - self._joined_at
            self._entry = self._since = None
            queue.leave(entry, served=served)

    def note_running(self) -> None:
        """A worker computes the request: it may wait again, however many do, should that worker be lost."""
        self._is_known = True

    def close(self) -> None:
        """Leave the queue for good."""
        self.leave(served=False)
        self._on_room = lambda: None

    @property
    def _until(self) -> float:
        return (self._since or now()) + self.max_wait_s
