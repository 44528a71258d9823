"""The mailbox of one request: the events of all its legs, in order of arrival."""

import asyncio
import contextvars
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Protocol

from baton.service.clock import now
from baton.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Lost:
    """The session with the worker has ended, and this leg with it."""

    reason: str


class Rejoined:
    """The session is up again; posted to legs that were opened while it was not."""


class Stalled:
    """The worker's engine does not step, though its session is alive; posted again with each report that says so."""


@dataclass(slots=True)
class Tokens:
    """Tokens of one choice, in order: one row of a StepOutput, joined with later rows while nobody has read it."""

    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: list[inference_pb2.Logprobs]
    finish_reason: int


class Overflow:
    """More tokens are unread than the bound allows, and the leg was cancelled."""


class EventSink(Protocol):
    """The receiver of a leg's events: the Mailbox of its request, or a PrefixSource."""

    def post(self, leg, event) -> None:
        """Take an event of `leg`."""

    def add(self, leg, choice: int, first_index: int, token_ids, logprobs, finish_reason: int) -> None:
        """Take a row of tokens that may wait for `flush`."""

    def flush(self) -> bool:
        """Pass on the rows that have waited; return whether there were any."""
        ...


class _Done:
    """An awaitable that is done: to await it takes no turn of the event loop."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_DONE = _Done()
_CONTEXT = contextvars.Context()  # shared by all timers: else each would keep a copy


class Mailbox:
    """A queue of one request's events with one reader. Some events wake the reader, tokens may wait for `flush`."""

    __slots__ = (
        "_entries",
        "_called",
        "_waiting",
        "_until",
        "_timer",
        "_timer_at",
        "_loop",
        "_timeout",
        "_timeout_at",
    )

    def __init__(self) -> None:
        self._entries: list = []  # few at a time: a deque would reserve memory for 64
        self._called = False
        self._waiting: asyncio.Future | None = None
        self._until = 0.0  # when the reader's wait is over
        self._timer: asyncio.TimerHandle | None = None  # kept from one wait to the next: most end at the same time
        self._timer_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None  # kept: to ask for it is a system call for each message
        self._timeout: asyncio.Timeout | None = None
        self._timeout_at = 0.0

    def post(self, leg, event) -> None:
        """Add an event and wake the reader. `leg` is None for events of the gateway itself."""
        self._entries.append((leg, event))
        self._call()

    def add(self, leg, choice: int, first_index: int, token_ids, logprobs, finish_reason: int) -> None:
        """Add a row of tokens without waking the reader; `flush` wakes it."""
        last_leg, last = self._entries[-1] if self._entries else (None, None)
        is_next = last_leg is leg and type(last) is Tokens and last.choice == choice and not last.finish_reason
        if is_next and last.first_index + len(last.token_ids) == first_index:
            last.token_ids += token_ids
            last.logprobs += logprobs
            last.finish_reason = finish_reason
        else:
            self._entries.append((leg, Tokens(choice, first_index, token_ids, logprobs, finish_reason)))

    def flush(self) -> bool:
        """Wake the reader if there is something to read; return whether there is."""
        if self._entries:
            self._call()
        return bool(self._entries)

    def take(self) -> tuple | None:
        """Remove and return the next (leg, event), or return None if there is none."""
        if self._entries:
            return self._entries.pop(0)
        self._called = False
        return None

    def wait(self, until: float) -> Awaitable[None]:
        """Return an awaitable for the next event since `take` returned None; it is done at `until` (time.monotonic())
        at the latest.

        This is no coroutine, which would add a quarter KB to an open stream."""
        if self._called:
            return _DONE
        loop = self._loop = self._loop or asyncio.get_running_loop()
        self._until = until
        self._set_timer(loop, until)
        self._waiting = loop.create_future()
        return self._waiting

    def set_timeout(self, timeout: asyncio.Timeout, at: float) -> None:
        """Let `timeout` end what the reader does outside of this mailbox, at `at` (time.monotonic()).

        The timeout shares the mailbox's timer, since one of its own would add 0.7 KB to an open stream."""
        self._timeout, self._timeout_at = timeout, at

    def arm_timeout(self) -> None:
        """Make sure that a timer runs that ends the timeout: the reader may not wait here for a long time."""
        if self._timer is None and self._timeout is not None:
            self._set_timer(asyncio.get_running_loop(), self._timeout_at)

    def interrupt(self) -> None:
        """Let the timeout end now, unless the reader waits here: then a posted event wakes it."""
        if self._timeout is not None and not self._is_awaited:
            self._end_timeout()

    def close(self) -> None:
        """Cancel the timer, and drop unread events: they refer to legs, which refer back to this mailbox."""
        self._stop_timer()
        self._timeout = None
        self._entries.clear()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_timeout(self) -> None:
        self._timeout.reschedule(0.0)
        self._timeout = None  # it can be ended once

    def _call(self) -> None:
        self._called = True
        self._wake()

    @property
    def _is_awaited(self) -> bool:
        return self._waiting is not None and not self._waiting.done()

    def _wake(self) -> None:
        if self._is_awaited:
            self._waiting.set_result(None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        """Make sure that the timer rings by `until`.

        A timer that rings too early is set again when it rings: to set one for every message would take 5 us each."""
        if self._timer is not None and self._timer_at > until:
            self._stop_timer()
        if self._timer is None:
            self._timer_at = until
            self._timer = loop.call_later(max(0.0, until - now()), self._ring, context=_CONTEXT)

    def _ring(self) -> None:
        self._timer = None
        if self._is_awaited and now() >= self._until:
            self._wake()
        elif self._is_awaited:
            self._set_timer(self._loop, self._until)
        elif self._timeout is not None and now() >= self._timeout_at:
            self._end_timeout()
        else:
            self.arm_timeout()
