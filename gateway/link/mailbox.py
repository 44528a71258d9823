"""The events of one request's legs, in one place and in order of arrival."""

import asyncio
import contextvars
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Protocol

from baton.service.clock import now
from baton.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Lost:
    """The session has ended, and with it this leg."""

    reason: str


class Rejoined:
    """The session is up, for a leg that was opened while it was not."""


class Stalled:
    """The worker's engine does not step, though its session is alive. It comes again with each report that says so."""


@dataclass(slots=True)
class Tokens:
    """Tokens of one choice, in order: a row of a StepOutput, and rows that continue it unread."""

    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: list[inference_pb2.Logprobs]
    finish_reason: int


class Overflow:
    """More tokens are unread than the bound allows; the leg was cancelled."""


class EventSink(Protocol):
    """The receiver of a leg's events: the Mailbox of its request, or a PrefixSource."""

    def post(self, leg, event) -> None:
        """Take an event of `leg`."""

    def add(self, leg, choice: int, first_index: int, token_ids, logprobs, finish_reason: int) -> None:
        """Take a row of tokens that may wait for `flush`."""

    def flush(self) -> bool:
        """Pass on what has waited; return whether there is something."""
        ...


class _Done:
    """It takes no turn of the event loop."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_DONE = _Done()
_CONTEXT = contextvars.Context()  # of all timers: each would have a copy of its own


class Mailbox:
    """Events of one request, in order of arrival. It has one reader, which is woken by some and not by others."""

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
        self._entries: list = []  # few: a deque sets 64 places aside
        self._called = False
        self._waiting: asyncio.Future | None = None
        self._until = 0.0  # when that wait is over
        self._timer: asyncio.TimerHandle | None = None  # stays from one wait to the next: most end at the same time
        self._timer_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None  # kept: asking for it is a system call, once a message
        self._timeout: asyncio.Timeout | None = None
        self._timeout_at = 0.0

    def post(self, leg, event) -> None:
        """Add an event and wake the reader. `leg`: None for events of the gateway itself."""
        self._entries.append((leg, event))
        self._call()

    def add(self, leg, choice: int, first_index: int, token_ids, logprobs, finish_reason: int) -> None:
        """Add a row of tokens without waking the reader: see `flush`."""
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
        """Return the next (leg, event), or None."""
        if self._entries:
            return self._entries.pop(0)
        self._called = False
        return None

    def wait(self, until: float) -> Awaitable[None]:
        """Return what is done once the reader is woken since it found nothing, or at `until` (time.monotonic()). No
        coroutine: that would be a quarter KB of an open stream."""
        if self._called:
            return _DONE
        loop = self._loop = self._loop or asyncio.get_running_loop()
        self._until = until
        self._set_timer(loop, until)
        self._waiting = loop.create_future()
        return self._waiting

    def set_timeout(self, timeout: asyncio.Timeout, at: float) -> None:
        """End what the reader does elsewhere by `timeout`, at `at` (time.monotonic()). It has no timer of its own,
        which would be 0.7 KB of an open stream: see `arm_timeout`."""
        self._timeout, self._timeout_at = timeout, at

    def arm_timeout(self) -> None:
        """The reader may be away for long: make sure that a timer rings by then."""
        if self._timer is None and self._timeout is not None:
            self._set_timer(asyncio.get_running_loop(), self._timeout_at)

    def interrupt(self) -> None:
        """End what the reader does elsewhere by its timeout, now; one that waits here is woken by what is posted."""
        if self._timeout is not None and not self._is_awaited:
            self._end_timeout()

    def close(self) -> None:
        """Cancel the timer, and drop what is unread: it names legs, and they lead back here."""
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
        """Make sure that it rings by `until`. One that rings too early is set again: setting one takes 5 us, once a
        message."""
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
