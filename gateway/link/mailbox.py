"""What workers have to say to one request: the events of its legs, in one place, in order of arrival."""

import asyncio
from dataclasses import dataclass

from baton.service.clock import now
from baton.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is gone, and with it this leg."""

    reason: str


class Rejoined:
    """The session is there, for a leg that was opened while it was not."""


class Stalled:
    """The worker's engine stands still; its session does not."""


@dataclass(slots=True)
class Tokens:
    """Tokens of one choice, in order: a row of a StepOutput, and of later ones what goes on from there unread."""

    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: list[inference_pb2.Logprobs]
    finish_reason: int


class Overflow:
    """More tokens are unread than the bound allows; the leg was cancelled."""


class Mailbox:
    """What the legs of one request have to say, in order of arrival. One reader, who is called, or left waiting."""

    __slots__ = ("_entries", "_called", "_waiting", "_timer", "_timer_at")

    def __init__(self) -> None:
        self._entries: list = []  # few: a deque sets 64 places aside
        self._called = False
        self._waiting: asyncio.Future | None = None
        self._timer: asyncio.TimerHandle | None = None  # stays from one wait to the next: most end at the same time
        self._timer_at = 0.0

    def post(self, leg, event) -> None:
        """`leg`: None where the gateway itself speaks."""
        self._entries.append((leg, event))
        self._call()

    def add(self, leg, choice: int, first_index: int, token_ids, logprobs, finish_reason: int) -> None:
        """A row of tokens, which the reader is not called for: see `hurry`."""
        last_leg, last = self._entries[-1] if self._entries else (None, None)
        is_next = last_leg is leg and type(last) is Tokens and last.choice == choice and not last.finish_reason
        if is_next and last.first_index + len(last.token_ids) == first_index:
            last.token_ids += token_ids
            last.logprobs += logprobs
            last.finish_reason = finish_reason
        else:
            self._entries.append((leg, Tokens(choice, first_index, token_ids, logprobs, finish_reason)))

    def hurry(self) -> bool:
        """What is there is to be read now. Whether there is something."""
        if self._entries:
            self._call()
        return bool(self._entries)

    def take(self):
        """(leg, event), or None when nothing is there."""
        if self._entries:
            return self._entries.pop(0)
        self._called = False
        return None

    async def next(self, until: float):
        """(leg, event) once the reader is called, or None at `until` (monotonic)."""
        while not self._called:
            loop = asyncio.get_running_loop()
            self._set_timer(loop, until)
            self._waiting = loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
            if now() >= until:
                break
        return self.take()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._called = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        """One that rings too early is set again; setting one takes 5 us, and this is once a message."""
        if self._timer is not None and self._timer_at > until:
            self.close()
        if self._timer is None:
            self._timer_at = until
            self._timer = loop.call_later(max(0.0, until - now()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._wake()
