"""The one timer of a mailbox's reader: it ends the reader's waits for events, and what the reader does elsewhere."""

import asyncio
import contextvars

from baton.service.clock import now

_CONTEXT = contextvars.Context()  # shared by all timers: else each would keep a copy


class ReaderTimer:
    """Wake the reader when its wait for an event is over, or end its writing to the client by a timeout.

    Both share one timer, since a second one would add 0.7 KB to an open stream. Times are time.monotonic()."""

    __slots__ = (
        "_waiting",
        "_until",
        "_handle",
        "_rings_at",
        "_loop",
        "_timeout",
        "_timeout_at",
    )

    def __init__(self) -> None:
        self._waiting: asyncio.Future | None = None
        self._until = 0.0  # when the reader's wait is over
        self._handle: asyncio.TimerHandle | None = None  # kept from one wait to the next: most end at the same time
        self._rings_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None  # kept: to ask for it is a system call for each message
        self._timeout: asyncio.Timeout | None = None
        self._timeout_at = 0.0

    def wait(self, until: float) -> asyncio.Future[None]:
        """Return a future that is done when the reader is woken, at `until` at the latest."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        self._until = until
        self._set(loop, until)
        self._waiting = loop.create_future()
        return self._waiting

    def wake(self) -> None:
        """End the reader's wait, if it waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def set_timeout(self, timeout: asyncio.Timeout, at: float) -> None:
        """Let `timeout` end at `at` what the reader does instead of waiting here, once the timer is armed."""
        self._timeout, self._timeout_at = timeout, at

    def arm(self) -> None:
        """Make sure that a timer runs that ends the timeout: the reader may not wait here for a long time."""
        if self._handle is None and self._timeout is not None:
            self._set(asyncio.get_running_loop(), self._timeout_at)

    def interrupt(self) -> None:
        """Let the timeout end now, unless the reader waits here: then a posted event wakes it."""
        if self._timeout is not None and not self._is_waiting:
            self._end_timeout()

    def close(self) -> None:
        """Cancel the timer, and forget the timeout."""
        self._stop()
        self._timeout = None

    @property
    def _is_waiting(self) -> bool:
        return self._waiting is not None and not self._waiting.done()

    def _set(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        """Make sure that the timer rings by `until`.

        A timer that rings too early is set again when it rings: to set one for every message would take 5 us each."""
        if self._handle is not None and self._rings_at > until:
            self._stop()
        if self._handle is None:
            self._rings_at = until
            self._handle = loop.call_later(max(0.0, until - now()), self._on_timer, context=_CONTEXT)

    def _stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.reschedule(0.0)
            self._timeout = None  # it can be ended once

    def _on_timer(self) -> None:
        self._handle = None
        if self._is_waiting and now() >= self._until:
            self.wake()
        elif self._is_waiting and self._loop is not None:
            self._set(self._loop, self._until)
        elif self._timeout is not None and now() >= self._timeout_at:
            self._end_timeout()
        else:
            self.arm()
