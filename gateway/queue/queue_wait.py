"""The wait of one request in the queues, while every worker of a role is full."""

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
_OTHERS_POLL_S = 1.0  # of those behind the first, since a worker may suit them and not the first


class QueueWait:
    """The wait of one request, in one queue at a time. `on_room()` is called when the request is first and there may be
    room."""

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
        self._since: float | None = None  # kept when it changes to another queue
        self._joined_at = 0.0
        self._retry_at = 0.0
        self._look_at = math.inf
        self._is_known = False  # it has waited or run, so it is not refused any more because too many wait
        self.waited_s = defaultdict[str, float](float)  # in queues that it has left, by bottleneck

    @property
    def is_queued(self) -> bool:
        """Whether the request is in a queue."""
        return self._entry is not None

    @property
    def is_over(self) -> bool:
        """Whether the request has waited for `max_wait_s`."""
        return now() >= self._until

    @property
    def wake_at(self) -> float:
        """When to try again without being called, in time.monotonic(): the first request at its worker's hint, any
        other when its wait is over, or sooner if it waits for a worker that suits it."""
        is_first = self._entry is not None and self._entry[0].is_first(self._entry[1])
        return min(self._until, self._retry_at if is_first else self._look_at)

    def note_refusal(self, refused: pb.Refused) -> None:
        """Keep a worker's hint of when to try again."""
        self._retry_at = now() + min(max(refused.retry_after_ms / 1000, _LEAST_HINT_S), _LONGEST_HINT_S)

    def join(self, queue: WaitingQueue) -> None:
        """Join a queue, or stay in it after another refusal. The time waited in another queue counts on. Raises
        Overloaded if too many wait and the request has neither waited nor run before."""
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
        """Join a queue, or stay in it, while no worker that suits the request serves. It then tries again by itself,
        and soon if it is first. Raises Overloaded as `join` does."""
        self.join(queue)
        self._retry_at, self._look_at = now() + _WORKER_POLL_S, now() + _OTHERS_POLL_S

    def wait_longer(self, max_wait_s: float) -> bool:
        """Raise the longest wait to `max_wait_s`; return whether that is longer than before."""
        is_longer = max_wait_s > self.max_wait_s
        self.max_wait_s = max(self.max_wait_s, max_wait_s)
        return is_longer

    def time_out(self) -> NoReturn:
        """Raise Overloaded because the longest wait is over. Other requests may have been served meanwhile."""
        message = f"it waited in line for a worker with room for {self.max_wait_s:g} s"
        raise Overloaded(message, max(1.0, self.max_wait_s / 10), reason="QUEUE_WAIT")

    def leave(self, served: bool) -> None:
        """Leave the queue, if the request is in one. `served`: a worker took the request."""
        if self._entry is not None:
            queue, entry = self._entry
            self.waited_s[queue.bottleneck] += now() - self._joined_at
            self._entry = self._since = None
            queue.leave(entry, served=served)

    def note_running(self) -> None:
        """Note that a worker computes the request: if that worker is lost, it may wait again however many do."""
        self._is_known = True

    def close(self) -> None:
        """Leave the queue for good."""
        self.leave(served=False)
        self._on_room = lambda: None

    @property
    def _until(self) -> float:
        return (self._since or now()) + self.max_wait_s
