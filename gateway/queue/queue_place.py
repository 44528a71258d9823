"""The place of one request in the lines, while every worker of a role is full."""

from collections.abc import Callable

from baton.service.clock import now
from baton.v1 import worker_pb2 as pb
from gateway.queue.admission import Bid, Place, WaitingLine

_LEAST_HINT_S, _LONGEST_HINT_S = 0.02, 0.5


class QueuePlace:
    """A place in one line at most. `on_room()` is called when it is first and there may be room."""

    def __init__(self, bid: Bid, on_room: Callable[[], None], max_wait_s: float):
        self._bid, self._on_room, self._max_wait_s = bid, on_room, max_wait_s
        self._place: tuple[WaitingLine, Place] | None = None
        self._since: float | None = None
        self._retry_at = 0.0

    @property
    def is_over(self) -> bool:
        """Return whether it has waited for `max_wait_s`."""
        return now() >= self._until

    @property
    def wake_at(self) -> float:
        """The time to try again without being called (time.monotonic()): at a worker's hint if it is first, else when
        it is over."""
        is_first = self._place is not None and self._place[0].is_first(self._place[1])
        return min(self._until, self._retry_at) if is_first else self._until

    def note_refusal(self, refused: pb.Refused) -> None:
        """Keep a worker's hint of when to try again."""
        self._retry_at = now() + min(max(refused.retry_after_ms / 1000, _LEAST_HINT_S), _LONGEST_HINT_S)

    def join(self, line: WaitingLine) -> None:
        """Join a line, or stay in it after another refusal. Raises Overloaded: the line is full."""
        self._since = self._since or now()
        if self._place is None:
            self._retry_at = max(self._retry_at, now() + _LEAST_HINT_S)
            self._place = line, line.join(self._bid, self._on_room)
        else:
            line.refused(self._place[1])

    def leave(self, served: bool) -> None:
        """Leave the line, if it is in one. `served`: a worker took the request."""
        if self._place is not None:
            line, place = self._place
            self._place = self._since = None
            line.leave(place, served=served)

    def close(self) -> None:
        """Leave the line for good."""
        self.leave(served=False)
        self._on_room = lambda: None

    @property
    def _until(self) -> float:
        return (self._since or now()) + self._max_wait_s
