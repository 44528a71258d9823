"""What bounds the gateway: requests at once, and the lines in which they wait for workers that are full."""

import itertools
from collections.abc import Callable

from baton.service.errors import Overloaded

_RETRY_AFTER_S = 0.5


class Admission:
    """Counts requests in the gateway and remembers their ids."""

    def __init__(self, max_concurrent_requests: int):
        self._max = max_concurrent_requests
        self.request_ids: set[str] = set()

    def enter(self, request_id: str) -> None:
        """Raises Overloaded. The caller has checked that the id is free, and calls `leave` in the end."""
        if len(self.request_ids) >= self._max:
            raise Overloaded(
                f"{self._max} requests are in the gateway already", _RETRY_AFTER_S, reason="TOO_MANY_REQUESTS"
            )
        self.request_ids.add(request_id)

    def leave(self, request_id: str) -> None:
        self.request_ids.discard(request_id)


class Place:
    """A place in a line; `rank` orders it."""

    __slots__ = ("rank", "call")

    def __init__(self, rank: tuple[int, int], call: Callable[[], None]):
        self.rank, self.call = rank, call


class Line:
    """Requests that every worker of a role has refused. Only the first is called when there may be room, so nobody
    overtakes it: higher priority goes first, then who came first."""

    def __init__(self, max_waiting: int):
        self._max = max_waiting
        self._places: list[Place] = []
        self._arrivals = itertools.count()

    @property
    def is_empty(self) -> bool:
        return not self._places

    def __len__(self) -> int:
        return len(self._places)

    def join(self, priority: int, call: Callable[[], None]) -> Place:
        """`call` is called each time the place is first and there may be room. Raises Overloaded: the line is full."""
        if len(self._places) >= self._max:
            raise Overloaded(
                f"every worker is full and {self._max} requests wait already", _RETRY_AFTER_S, reason="QUEUE_FULL"
            )
        place = Place((-priority, next(self._arrivals)), call)
        self._places.append(place)
        self._places.sort(key=lambda place: place.rank)
        return place

    def is_first(self, place: Place) -> bool:
        return self._places[0] is place

    def leave(self, place: Place) -> None:
        self._places.remove(place)
        self.call_first()

    def call_first(self) -> None:
        """Something has changed: there may be room."""
        if self._places:
            self._places[0].call()


class Lines:
    """Where requests wait for workers that are full."""

    def __init__(self, max_waiting: int):
        self.credit, self.prefill = Line(max_waiting), Line(max_waiting)

    def __len__(self) -> int:
        return len(self.credit) + len(self.prefill)

    def call_first(self) -> None:
        self.credit.call_first()
        self.prefill.call_first()
