"""What bounds the gateway: requests at once, what each tenant may use, and the lines in which requests wait for workers
that are full. Who could only be served too late is told at once."""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from baton.service.errors import Overloaded
from baton.service.slo import Slo
from gateway.quotas import Quotas, Reservation
from gateway.routing import Decision
from gateway.timing import now

_RETRY_AFTER_S, _LONGEST_RETRY_S = 0.5, 10.0
# A step of priority is worth so many seconds of waiting: nobody is overtaken by those who come later than that.
_PRIORITY_S, _MOST_STEPS = 1.0, 10
_NO_HURRY_S = 10.0  # a class without a bound on the first token stands in line as if this were its bound
_MARGIN = 0.7  # of the wait that would just do: predictions err, and who is let in should be served in time
_LEAST_WAIT_S = 0.05  # a shorter wait is nobody's reason to refuse
_KEPT = 0.9  # of what the line's speed was, with each that is served


class Bid(NamedTuple):
    """What a request brings to the lines. `slo`: of the class that it has named, else empty. Lower ranks go first."""

    rank: float
    num_tokens: int = 0
    slo: Slo = Slo()
    max_wait_s: float = 10.0
    deadline: float = math.inf

    def check_wait(self, wait_s: float, alone_s: float) -> None:
        """`alone_s`: what the first token takes where nobody is ahead. A prompt that alone takes longer than its class
        allows is not refused for that: it may wait as long as it takes. Raises Overloaded."""
        left_s = self.deadline - now()
        if wait_s > _LEAST_WAIT_S and wait_s + alone_s > left_s:
            retry_s = min(max(wait_s + alone_s - left_s, _RETRY_AFTER_S), _LONGEST_RETRY_S)
            told = f"the first token would take {wait_s + alone_s:.1f} s, and the deadline is in {left_s:.1f} s"
            raise Overloaded(told, retry_s, reason="DEADLINE_BUDGET")
        patience_s = self.max_wait_s
        if self.slo.ttft_s is not None:
            patience_s = min(patience_s, max(self.slo.ttft_s - alone_s, alone_s))
        if wait_s > max(_MARGIN * patience_s, _LEAST_WAIT_S):
            retry_s = min(max(wait_s - patience_s, _RETRY_AFTER_S), _LONGEST_RETRY_S)
            told = f"the first token would take {wait_s + alone_s:.1f} s, {wait_s:.1f} s of them in line"
            raise Overloaded(told, retry_s, reason="TTFT_BUDGET")

    def check(self, decision: Decision, in_line_s: float) -> None:
        """Raises Overloaded where the way that was found, and the line before it, break what its class was promised."""
        at_worker_s = decision.ttft_s - decision.alone_ttft_s
        self.check_wait(at_worker_s + (0.0 if decision.local else in_line_s), decision.alone_ttft_s)
        bound_s = self.slo.tpot_s
        if bound_s is not None and decision.tpot_s > max(bound_s, 2 * decision.alone_tpot_s):
            told = f"tokens would take {1e3 * decision.tpot_s:.0f} ms each, the class allows {1e3 * bound_s:.0f} ms"
            raise Overloaded(told, _RETRY_AFTER_S, reason="TPOT_BUDGET")


def rank(received: float, slo: Slo, priority: int) -> float:
    """Earliest deadline first, and a step of priority makes a deadline earlier by a second: what is fixed when a
    request comes needs no aging, since all who come later have later deadlines."""
    steps = max(-_MOST_STEPS, min(_MOST_STEPS, priority))
    return received + (_NO_HURRY_S if slo.ttft_s is None else slo.ttft_s) - _PRIORITY_S * steps


class Admission:
    """Counts requests in the gateway and remembers their ids."""

    def __init__(self, max_concurrent_requests: int, quotas: Quotas | None = None):
        self._max = max_concurrent_requests
        self.quotas = quotas or Quotas({})
        self.request_ids: set[str] = set()

    def enter(self, request_id: str, tenant: str, num_choices: int = 1) -> Reservation:
        """Returns what it has set aside of its tenant's quota. Raises Overloaded, InvalidRequest. The caller has checked
        that the id is free, and calls `leave` in the end."""
        if len(self.request_ids) >= self._max:
            raise Overloaded(
                f"{self._max} requests are in the gateway already", _RETRY_AFTER_S, reason="TOO_MANY_REQUESTS"
            )
        reservation = self.quotas.enter(tenant, now(), num_choices)
        self.request_ids.add(request_id)
        return reservation

    def leave(self, request_id: str, reservation: Reservation, num_used: int) -> None:
        """It has come to so many tokens."""
        self.request_ids.discard(request_id)
        reservation.settle(num_used, now())


class Place:
    """A place in a line."""

    __slots__ = ("order", "bid", "call", "is_open")

    def __init__(self, order: tuple[float, int], bid: Bid, call: Callable[[], None]):
        self.order, self.bid, self.call, self.is_open = order, bid, call, True

    def __lt__(self, other: "Place") -> bool:
        return self.order < other.order


class Line:
    """Requests that every worker of a role has refused. Only the first is called when there may be room, so nobody
    overtakes it. Bounded in requests and in tokens of their prompts."""

    def __init__(self, max_waiting: int, max_tokens: int = 1 << 30):
        self._max, self._max_tokens = max_waiting, max_tokens
        self._heap: list[Place] = []  # those that left are dropped when they come first
        self._arrivals = itertools.count()
        self._num = self.num_tokens = 0
        self._served_tokens = self._served_s = 0.0
        self._served_at = 0.0  # the last time, or since when the line has stood

    @property
    def is_empty(self) -> bool:
        return not self._num

    def __len__(self) -> int:
        return self._num

    def join(self, bid: Bid, call: Callable[[], None]) -> Place:
        """`call` is called each time the place is first and there may be room. Raises Overloaded: the line is full."""
        if self._num >= self._max:
            raise Overloaded(
                f"every worker is full and {self._max} requests wait already", _RETRY_AFTER_S, reason="QUEUE_FULL"
            )
        if self._num and self.num_tokens + bid.num_tokens > self._max_tokens:
            told = f"every worker is full and {self.num_tokens} tokens wait already, at most {self._max_tokens} may"
            raise Overloaded(told, _RETRY_AFTER_S, reason="QUEUE_TOKENS")
        if not self._num:
            self._served_at = now()
        place = Place((bid.rank, next(self._arrivals)), bid, call)
        heapq.heappush(self._heap, place)
        self._num, self.num_tokens = self._num + 1, self.num_tokens + bid.num_tokens
        return place

    def is_first(self, place: Place) -> bool:
        return self._first() is place

    def leave(self, place: Place, served: bool = True) -> None:
        """`served`: a worker took it; else it gave up."""
        place.is_open = False
        self._num, self.num_tokens = self._num - 1, self.num_tokens - place.bid.num_tokens
        if served:
            at = now()
            self._served_tokens = _KEPT * self._served_tokens + place.bid.num_tokens
            self._served_s, self._served_at = _KEPT * self._served_s + at - self._served_at, at
        self.call_first()

    def call_first(self) -> None:
        """Something has changed: there may be room."""
        if (place := self._first()) is not None:
            place.call()

    def wait_s(self, rank: float) -> float:
        """How long one of `rank` would stand here, as fast as the line has moved; 0 until it has."""
        if not self._num or not self._served_tokens:
            return 0.0
        ahead = sum(place.bid.num_tokens for place in self._heap if place.is_open and place.order[0] <= rank)
        # A line that stands still is slower than it was.
        standing_s = max(0.0, now() - self._served_at - self._served_s * (1 - _KEPT))
        return ahead * (self._served_s + standing_s) / self._served_tokens

    def _first(self) -> Place | None:
        while self._heap and not self._heap[0].is_open:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class Lines:
    """Where requests wait for workers that are full: for room to decode, and then for one to read the prompt."""

    def __init__(self, max_waiting: int, max_tokens: int = 1 << 30):
        self.credit, self.prefill = Line(max_waiting, max_tokens), Line(max_waiting, max_tokens)

    def __len__(self) -> int:
        return len(self.credit) + len(self.prefill)

    def check(self, bid: Bid, alone_s: float) -> None:
        """Raises Overloaded for whom the lines are too long."""
        bid.check_wait(self.credit.wait_s(bid.rank) + self.prefill.wait_s(bid.rank), alone_s)

    def call_first(self) -> None:
        self.credit.call_first()
        self.prefill.call_first()
