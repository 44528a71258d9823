"""What workers have to say to one request: the events of its legs, in one place, in order of arrival."""

import asyncio
from collections import deque
from dataclasses import dataclass

from baton.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is gone, and with it this leg."""

    reason: str


class Rejoined:
    """The session is there, for a leg that was opened while it was not."""


class Stalled:
    """The worker's engine stands still; its session does not."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One row of a StepOutput: tokens of one choice, in order."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[inference_pb2.Logprobs, ...]
    finish_reason: int


class Overflow:
    """More tokens are unread than the bound allows; the leg was cancelled."""


class Mailbox:
    """What the legs of one request have to say, in order of arrival. One reader."""

    def __init__(self) -> None:
        self._entries: deque = deque()
        self._waiting: asyncio.Future | None = None

    def post(self, leg, event) -> None:
        """`leg`: None where the gateway itself speaks."""
        self._entries.append((leg, event))
        if self._waiting is not None:
            _wake(self._waiting)

    def take(self):
        """(leg, event), or None when nothing is there."""
        return self._entries.popleft() if self._entries else None

    async def next(self, timeout_s: float):
        """(leg, event), or None after `timeout_s`."""
        if not self._entries:
            # A timer of its own: asyncio.timeout takes 10 us, and this is once a token.
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(timeout_s, _wake, self._waiting)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        return self.take()


def _wake(waiting: asyncio.Future) -> None:
    if not waiting.done():
        waiting.set_result(None)
