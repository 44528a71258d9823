"""The queues in which requests wait for full workers. A request that could only be served too late is refused when it
comes. Tenants share the room, so one that sends much does not shut out others."""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from baton.fairness import RoundRobin, has_room
from baton.protocol import DEFAULT_TENANT, KV_FULL
from baton.service.clock import now
from baton.service.errors import Overloaded
from baton.service.slo import Slo
from gateway.routing.routing import Decision

_RETRY_AFTER_S, _LONGEST_RETRY_S = 0.5, 10.0
# Seconds of waiting that a step of priority is worth: requests that come later than that overtake no other.
_PRIORITY_S, _MOST_STEPS = 1.0, 10
_NO_HURRY_S = 10.0  # the TTFT bound, for the order in queue, of a class without one
_MARGIN = 0.7  # of the longest wait: predictions err, and an admitted request should be served in time
_LEAST_WAIT_S = 0.05  # a shorter wait is no reason to refuse
_KEPT = 0.9  # weight of the queue's earlier speed, with each request that is served
# Tokens that a tenant is served before another's turn comes: fewer than a request's, so each request is one turn or
# more. And tokens that a tenant may save up of turns that it did not take.
_TURN_TOKENS, _SAVED_TOKENS = 64, 2048


class QueuedRequest(NamedTuple):
    """A request as the queues see it. `slo` is empty if the request names no class; of one tenant, lower ranks go
    first; `num_expected` are output tokens of all choices, by the mean of recent answers."""

    rank: float
    num_tokens: int = 0
    slo: Slo = Slo()
    max_wait_s: float = 10.0
    deadline: float = math.inf
    tenant: str = DEFAULT_TENANT
    num_expected: float = 0.0

    def check_wait(self, wait_s: float, idle_ttft_s: float) -> None:
        """Raise Overloaded for a wait that breaks the deadline or the class.

        `idle_ttft_s` is the time of the first token on an idle worker. A prompt that takes longer than its class allows
        even there is not refused for that: it may wait as long as it takes."""
        left_s = self.deadline - now()
        if wait_s > _LEAST_WAIT_S and wait_s + idle_ttft_s > left_s:
            retry_s = min(max(wait_s + idle_ttft_s - left_s, _RETRY_AFTER_S), _LONGEST_RETRY_S)
            message = f"the first token would take {wait_s + idle_ttft_s:.1f} s, and the deadline is in {left_s:.1f} s"
            raise Overloaded(message, retry_s, reason="DEADLINE_BUDGET")
        patience_s = self.max_wait_s
        if self.slo.ttft_s is not None:
            patience_s = min(patience_s, max(self.slo.ttft_s - idle_ttft_s, idle_ttft_s))
        if wait_s > max(_MARGIN * patience_s, _LEAST_WAIT_S):
            retry_s = min(max(wait_s - patience_s, _RETRY_AFTER_S), _LONGEST_RETRY_S)
            message = f"the first token would take {wait_s + idle_ttft_s:.1f} s, {wait_s:.1f} s of that in the queue"
            raise Overloaded(message, retry_s, reason="TTFT_BUDGET")

    def check(self, decision: Decision, in_queue_s: float) -> None:
        """Raise Overloaded if the chosen route, with the queue before it, breaks the bounds of the class."""
        at_worker_s = decision.ttft_s - decision.idle_ttft_s
        self.check_wait(at_worker_s + (0.0 if decision.is_local else in_queue_s), decision.idle_ttft_s)
        bound_s = self.slo.tpot_s
        if bound_s is not None and decision.tpot_s > max(bound_s, 2 * decision.idle_tpot_s):
            message = f"tokens would take {1e3 * decision.tpot_s:.0f} ms each, the class allows {1e3 * bound_s:.0f} ms"
            raise Overloaded(message, _RETRY_AFTER_S, reason="TPOT_BUDGET")


def rank(received: float, slo: Slo, priority: int) -> float:
    """Return the order in a queue: earliest deadline first, each step of priority worth a second.

    The order is fixed at arrival and needs no aging, since all later requests have later deadlines."""
    steps = max(-_MOST_STEPS, min(_MOST_STEPS, priority))
    return received + (_NO_HURRY_S if slo.ttft_s is None else slo.ttft_s) - _PRIORITY_S * steps


class QueueEntry:
    """The entry of one request in a queue."""

    __slots__ = ("order", "queued", "call", "is_open")

    def __init__(self, order: tuple[float, int], queued: QueuedRequest, call: Callable[[], None]):
        self.order, self.queued, self.call, self.is_open = order, queued, call, True

    def __lt__(self, other: "QueueEntry") -> bool:
        return self.order < other.order


class _TenantQueue:
    """One tenant's entries in a queue, the lowest order first."""

    __slots__ = ("entries", "num_tokens")

    def __init__(self) -> None:
        self.entries: list[QueueEntry] = []
        self.num_tokens = 0

    def add(self, entry: QueueEntry) -> None:
        bisect.insort(self.entries, entry)
        self.num_tokens += entry.queued.num_tokens

    def remove(self, entry: QueueEntry) -> None:
        del self.entries[bisect.bisect_left(self.entries, entry)]  # no other has its order
        self.num_tokens -= entry.queued.num_tokens


class WaitingBounds:
    """Bound what waits in all queues together: requests and tokens of their prompts, in all and by tenant. A tenant
    below its share finds room even if others have taken everything."""

    def __init__(self, max_waiting: int, max_tokens: int):
        self._max, self._max_tokens = max_waiting, max_tokens
        self._num, self._num_tokens = Counter[str](), Counter[str]()  # by tenant

    def check(self, queued: QueuedRequest) -> None:
        """Raise Overloaded if this request may not wait too."""
        own, num = self._num[queued.tenant], self._num.total()
        num_sharing = len(self._num) + (not own)
        if not has_room(most=self._max, taken=num, own=own, more=1, num_sharing=num_sharing):
            message = f"every worker is full and {num} requests wait already, {own} of them of this tenant"
            raise Overloaded(message, _RETRY_AFTER_S, reason="QUEUE_FULL")
        own_tokens, num_tokens = self._num_tokens[queued.tenant], self._num_tokens.total()
        more, most = queued.num_tokens, self._max_tokens
        if own and not has_room(most=most, taken=num_tokens, own=own_tokens, more=more, num_sharing=num_sharing):
            message = f"every worker is full and {num_tokens} tokens wait already, at most {self._max_tokens} may"
            raise Overloaded(message, _RETRY_AFTER_S, reason="QUEUE_TOKENS")

    def add(self, queued: QueuedRequest) -> None:
        """Count a request that waits."""
        self._num[queued.tenant] += 1
        self._num_tokens[queued.tenant] += queued.num_tokens

    def remove(self, queued: QueuedRequest) -> None:
        """Count a request that no longer waits."""
        self._num[queued.tenant] -= 1
        self._num_tokens[queued.tenant] -= queued.num_tokens
        if not self._num[queued.tenant]:
            del self._num[queued.tenant], self._num_tokens[queued.tenant]


class WaitingQueue:
    """A queue of requests that every worker of a role has refused.

    Tenants take turns. When there may be room, the first request of the tenant whose turn it is gets called. If it is
    refused again, the next tenant's request is called, which may need less room."""

    def __init__(self, bounds: WaitingBounds, name: str, clock: Callable[[], float] = lambda: now()):
        self._bounds, self._now, self._name = bounds, clock, name
        self.refused_for = ""  # the reason of a worker's last refusal
        self._queues: dict[str, _TenantQueue] = {}  # none is empty
        self._turns = RoundRobin[str](_TURN_TOKENS, _SAVED_TOKENS)
        self._untried: set[str] = set()  # tenants whose first request was not refused since something changed
        self._arrivals = itertools.count()
        self._num = 0
        self._served_tokens = self._served_s = 0.0
        self._served_at = 0.0  # when the last one was served, or when the empty queue was joined, whichever is later

    @property
    def bottleneck(self) -> str:
        """What requests wait for here, one of BOTTLENECKS (baton/service/observe/bottleneck.py)."""
        return "kv pool" if self.refused_for == KV_FULL else self._name

    def is_open_to(self, tenant: str) -> bool:
        """Return whether no request of this tenant waits here."""
        return tenant not in self._queues

    def __len__(self) -> int:
        return self._num

    def join(self, queued: QueuedRequest, call: Callable[[], None], is_known: bool = False) -> QueueEntry:
        """Add a request and return its entry. `call` is called each time the entry is first and there may be room.
        Raises Overloaded if too many wait, unless the request `is_known`: it has waited before, or has run."""
        if not is_known:
            self._bounds.check(queued)
        queue = self._queues.get(queued.tenant) or _TenantQueue()
        if not self._num:
            self._served_at = self._now()
        entry = QueueEntry((queued.rank, next(self._arrivals)), queued, call)
        self._queues[queued.tenant] = queue
        self._turns.wait(self._queues)
        queue.add(entry)
        self._bounds.add(queued)
        self._num += 1
        return entry

    def is_first(self, entry: QueueEntry) -> bool:
        """Return whether this entry is next."""
        return self._first() is entry

    def call_next_tenant(self, entry: QueueEntry) -> None:
        """Call the next tenant's first request: there was no room for this entry, which was called or asked again."""
        if self.is_first(entry):
            self._untried = set(self._queues)
        self._untried.discard(entry.queued.tenant)
        if (tenant := self._turns.next(self._untried)) is not None:
            self._queues[tenant].entries[0].call()

    def leave(self, entry: QueueEntry, served: bool = True) -> None:
        """Remove an entry. `served`: a worker took the request."""
        queued = entry.queued
        entry.is_open, queue = False, self._queues[queued.tenant]
        self._bounds.remove(queued)
        queue.remove(entry)
        self._num -= 1
        if served:
            at = self._now()
            self._served_tokens = _KEPT * self._served_tokens + queued.num_tokens
            self._served_s, self._served_at = _KEPT * self._served_s + at - self._served_at, at
            self._turns.charge(queued.tenant, queued.num_tokens + queued.num_expected)
        if not queue.entries:
            del self._queues[queued.tenant]
            self._turns.wait(self._queues)
        self.call_first()

    def call_first(self) -> None:
        """Call the first entry: there may be room."""
        self._untried = set(self._queues)
        if (entry := self._first()) is not None:
            entry.call()

    def wait_s(self, queued: QueuedRequest) -> float:
        """Return how many seconds this request would wait here at the queue's recent speed. It is 0 while that is
        unknown, and for a tenant without a waiting request, whose next request asks the workers first."""
        queue = self._queues.get(queued.tenant)
        if queue is None or not self._served_tokens:
            return 0.0
        ahead = sum(entry.queued.num_tokens for entry in queue.entries if entry.order[0] <= queued.rank)
        # Until it is served, each other tenant is served as many tokens as its own.
        part = ahead + queued.num_tokens
        ahead += sum(min(part, other.num_tokens) for other in self._queues.values() if other is not queue)
        # A queue that does not move is slower than it was.
        standing_s = max(0.0, self._now() - self._served_at - self._served_s * (1 - _KEPT))
        return ahead * (self._served_s + standing_s) / self._served_tokens

    def _first(self) -> QueueEntry | None:
        tenant = self._turns.next(self._queues)
        return None if tenant is None else self._queues[tenant].entries[0]


class WaitingQueues:
    """The queues of a model, which share one bound: `credit` for room to decode, and then `prefill` for a worker to
    read the prompt.

    If no worker that serves could hold a request, or none has its adapter ready, the request waits in `decode_start` or
    `prefill_start` until one can. There it delays no request that can be served."""

    def __init__(self, max_waiting: int, max_tokens: int = 1 << 30, clock: Callable[[], float] = lambda: now()):
        names = ("decode queue", "prefill queue") * 2
        bounds = WaitingBounds(max_waiting, max_tokens)
        self._all = tuple(WaitingQueue(bounds, name, clock) for name in names)
        self.credit, self.prefill, self.decode_start, self.prefill_start = self._all

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def check(self, queued: QueuedRequest, idle_ttft_s: float) -> None:
        """Raise Overloaded if the queues are too long for this request; `idle_ttft_s` as in check_wait."""
        queued.check_wait(self.credit.wait_s(queued) + self.prefill.wait_s(queued), idle_ttft_s)

    def call_first(self) -> None:
        """Call the first entry of every queue: there may be room."""
        for queue in self._all:
            queue.call_first()
