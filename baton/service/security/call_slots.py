"""Slots for calls: they bound how many calls may be open, by method and by caller, so that no caller takes the slots of
others.

A call holds its slot from before its first message is read until it ends. Until that message arrives, the call is
silent and may lose its slot: if all slots of a caller are taken, a new call replaces the caller's oldest silent call.
So silent calls keep no other call out, not even one of the same caller."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import NamedTuple, TypeVar, cast
from urllib.parse import unquote

from baton.fairness import has_room
from baton.service.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded

MAX_CALLS = 256  # of all tenants without a quota
FIRST_MESSAGE_S, SHORT_MESSAGE_S = 5.0, 2.0
_INFERENCE = "/baton.v1.Inference/"
_WATCH = "/grpc.health.v1.Health/Watch"
_MAX_WATCHES_OF_HOST = 2  # by callers without certificate or key
_SPARE_CALLS = 8  # above a quota, which refuses with its own message
_RETRY_AFTER_S = 0.5

T = TypeVar("T")
Caller = str | frozenset[str] | None
"""A tenant, the roles of a certificate, or None: it shows nothing of itself."""


class _Kind(NamedTuple):
    max_calls: int  # per caller
    first_message_s: float = FIRST_MESSAGE_S


_KINDS = {
    _WATCH: _Kind(16, SHORT_MESSAGE_S),
    "/grpc.health.v1.Health/Check": _Kind(256, SHORT_MESSAGE_S),
    "/baton.v1.Registration/Register": _Kind(256),
    "/baton.v1.Worker/Session": _Kind(256),  # a gateway has one
    "/baton.kv.Raw/Pull": _Kind(1024, SHORT_MESSAGE_S),  # each request whose KV moves has one
}
_OTHERS = _Kind(16)  # calls of operators, reflection


class CallSlots:
    """Bound the open calls of one server. Belongs to its event loop.

    `max_calls` bounds the calls of all tenants to the methods of Inference. One tenant alone may have all of them; a
    tenant that comes later still gets its share."""

    def __init__(self, max_calls: int = MAX_CALLS, quota_of: Callable[[str], int | None] = lambda tenant: None):
        """Bound calls. `quota_of(tenant)` returns how many concurrent requests the tenant may have, None without a
        quota."""
        self._quota_of = quota_of
        self._max_calls = max_calls
        self._num_open: Counter[tuple[str, Caller]] = Counter()
        self._of_tenants: Counter[str] = Counter()  # open calls to Inference, by tenant
        self._num_watches: Counter[str] = Counter()  # by host, of callers without certificate or key
        self._silent: dict[tuple[str, Caller], dict[CallSlot, None]] = {}  # the oldest first
        self._watched: set[tuple[str, Caller]] = set()  # keys with a running timer for their oldest silent call

    def enter(self, method: str, caller: Caller, peer: str) -> "CallSlot":
        """Return a slot, for use in `with`. `peer` is gRPC's name of the caller's address. Raises Overloaded."""
        kind = _KINDS.get(method, _OTHERS)
        key = (_INFERENCE if method.startswith(_INFERENCE) else method, caller)
        host = _host(peer) if method == _WATCH and caller is None else ""
        if host and self._num_watches[host] >= _MAX_WATCHES_OF_HOST:
            raise _full(f"{host} watches health {_MAX_WATCHES_OF_HOST} times already")
        if not self._has_room(key, kind):
            if not self._silent.get(key):
                raise _full(f"{self._num_open[key]} calls of this kind are open already, by this caller")
            next(iter(self._silent[key])).end(
                _full("a newer call replaced this one, whose first message had not arrived")
            )
        slot = CallSlot(self, key, host)
        for counter, name in self._counted(slot):
            counter[name] += 1
        self._silent.setdefault(key, {})[slot] = None
        if key not in self._watched:
            self._watch(key, kind.first_message_s)
        return slot

    def _watch(self, key: tuple[str, Caller], due_s: float, in_s: float | None = None) -> None:
        """Start the timer that ends the silent calls of `key` when the oldest is too old. All calls of a kind and
        caller share one timer: a timer for each took a fifth of the cost of a silent call."""
        self._watched.add(key)
        asyncio.get_running_loop().call_later(due_s if in_s is None else in_s, self._end_late, key, due_s)

    def _end_late(self, key: tuple[str, Caller], due_s: float) -> None:
        self._watched.discard(key)
        for slot in list(self._silent.get(key, ())):
            if (left_s := slot.entered_at + due_s - time.monotonic()) > 0:
                return self._watch(key, due_s, left_s)
            late = f"the call's first message did not arrive within {due_s:g} s"
            slot.end(DeadlineExceeded(late, reason="MESSAGE_LATE"))

    def _has_room(self, key: tuple[str, Caller], kind: _Kind) -> bool:
        num_open = self._num_open[key]
        if key[0] != _INFERENCE:
            return num_open < kind.max_calls
        if (quota := self._quota_of(cast("str", key[1]))) is not None:  # the caller is a tenant
            return num_open < quota + _SPARE_CALLS
        num_tenants = len(self._of_tenants) + (key[1] not in self._of_tenants)
        return has_room(self._max_calls, self._of_tenants.total(), num_open, 1, num_tenants)

    def _counted(self, slot: "CallSlot") -> Iterator[tuple[Counter, Hashable]]:
        """Yield each counter that counts this call, with its key."""
        yield self._num_open, slot.key
        if slot.key[0] == _INFERENCE:
            yield self._of_tenants, slot.key[1]
        if slot.host:
            yield self._num_watches, slot.host

    def heard(self, slot: "CallSlot") -> None:
        """Record that the first message of the slot's call has arrived."""
        if (silent := self._silent.get(slot.key)) is not None:
            silent.pop(slot, None)
            if not silent:
                del self._silent[slot.key]

    def left(self, slot: "CallSlot") -> None:
        """Free the slot."""
        self.heard(slot)
        for counter, name in self._counted(slot):
            counter[name] -= 1
            if not counter[name]:
                del counter[name]


class CallSlot:
    """The slot of one call, held as a context manager."""

    __slots__ = ("key", "host", "entered_at", "_slots", "_task", "_error", "_is_left")

    def __init__(self, slots: CallSlots, key: tuple[str, Caller], host: str):
        self.key, self.host, self.entered_at = key, host, time.monotonic()
        self._slots = slots
        self._task: asyncio.Task | None = None  # the task that waits for the first message
        self._error: BatonError | None = None
        self._is_left = False

    async def first(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the first message, read by `read()`. Raises DeadlineExceeded if it does not arrive in time, Overloaded
        if another call takes the slot meanwhile, InvalidRequest if there is none (StopAsyncIteration)."""
        if self._error is not None:
            raise self._error
        self._task = task = asyncio.current_task()
        try:
            return await read()
        except StopAsyncIteration:
            raise InvalidRequest("message", "there is none") from None
        except asyncio.CancelledError:
            if self._error is None or task is None or task.uncancel():  # the call itself was cancelled
                raise
            raise self._error from None
        finally:
            self._task = None
            self._slots.heard(self)

    def end(self, error: BatonError) -> None:
        """Free the slot, and end the wait for the first message with `error`."""
        self._error = error
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> "CallSlot":
        return self

    def __exit__(self, *exc) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._is_left:
            self._is_left = True
            self._slots.left(self)


def _full(message: str) -> Overloaded:
    return Overloaded(message, _RETRY_AFTER_S, reason="TOO_MANY_CALLS")


def _host(peer: str) -> str:
    """Return the host of a peer: 198.51.100.7 of "ipv4:198.51.100.7:4711". On loopback, where all callers share an
    address, return the whole peer, which is one connection."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0]
    return peer if host in ("", "[::1]") or host.startswith("127.") else host
