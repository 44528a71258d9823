"""Decide how many steps of a worker one message carries, and after which step each request writes its message."""

import asyncio
from collections import deque
from collections.abc import Sequence

from baton.service.clock import now
from gateway.link.mailbox import EventSink

# A message takes about 60 us of a core, 35 of them in gRPC. Up to this rate there is time for one message per token.
FREE_TOKENS_PER_S = 8_000
# The longest time from a token's arrival to its message, without the time to write 128 messages, the network and
# client.
LONGEST_S = 0.015
_AT_ONCE = 16  # messages that are written in one turn of the event loop
_WINDOW_S = 0.25  # the rate of tokens is measured over this time
# One interval's weight in the mean, and the longest interval that counts: after a longer one the worker was idle.
_STEP_SHARE, _LONGEST_STEP_S = 0.1, 0.1


class TokenBatching:
    """Decide when mailboxes wake their readers; shared by all workers of a gateway. Belongs to the event loop."""

    def __init__(self) -> None:
        self.is_busy = False  # more tokens arrive than messages could be written
        self._num_tokens = 0
        self._since = now()
        self._due: deque[EventSink] = deque()
        self._held: deque[tuple[float, Sequence[EventSink]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, num_tokens: int, at: float) -> None:
        """Count tokens that arrived at `at` (time.monotonic())."""
        self._num_tokens += num_tokens
        if (elapsed := at - self._since) >= _WINDOW_S:
            self.is_busy = self._num_tokens > FREE_TOKENS_PER_S * elapsed
            self._num_tokens, self._since = 0, at

    def send(self, mailboxes: Sequence[EventSink]) -> None:
        """Flush these mailboxes soon, in their order.

        If steps arrive faster than messages can be written, a mailbox that waits here also gets the tokens of the next
        step."""
        if mailboxes and not self._due:
            asyncio.get_running_loop().call_soon(self._send_some)
        self._due.extend(mailboxes)

    def _send_some(self) -> None:
        num_left = _AT_ONCE
        try:
            while self._due and num_left:
                num_left -= self._due.popleft().flush()
        finally:  # also if a flush failed: otherwise no mailbox would ever be flushed again
            if self._due:
                asyncio.get_running_loop().call_soon(self._send_some)

    def hold(self, mailboxes: Sequence[EventSink]) -> None:
        """Flush these mailboxes after LONGEST_S, since no further step may come that flushes them sooner."""
        self._held.append((now() + LONGEST_S, mailboxes))
        if self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        left_s = max(0.0, self._held[0][0] - now())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._let_go)

    def _let_go(self) -> None:
        self._timer, at = None, now()
        while self._held and self._held[0][0] <= at:
            self.send(self._held.popleft()[1])
        if self._held:
            self._set_timer()


class MessageTurns:
    """Decide at which steps of one worker each sequence writes its message.

    Each sequence has its turn once in `_every` steps, and about as many sequences have their turn in each step, so
    messages are spread over time."""

    def __init__(self, batching: TokenBatching):
        self._batching = batching
        self._number, self._every = 0, 1
        self._step_s, self._at = 0.0, 0.0

    def begin(self, num_tokens: int) -> None:
        """Begin a step that has brought this many tokens."""
        at = now()
        self._step_s += _STEP_SHARE * (min(at - self._at, _LONGEST_STEP_S) - self._step_s)
        self._at = at
        self._batching.count(num_tokens, at)
        self._number += 1
        self._every = 1 + int(LONGEST_S / max(self._step_s, 0.001)) if self._batching.is_busy else 1

    def is_turn_of(self, turn_id: int) -> bool:
        """Return whether it is the turn of `turn_id`, a number that a sequence keeps for all its steps."""
        return (self._number + turn_id) % self._every == 0

    def end(self, due: Sequence[EventSink], held: Sequence[EventSink]) -> None:
        """End the step: flush the mailboxes `due` now and `held` later."""
        self._batching.send(due)
        if held:
            self._batching.hold(held)
