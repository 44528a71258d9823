"""Decide how many steps of a worker one message carries, and after which step each request writes its message."""

import asyncio
from collections import deque
from collections.abc import Sequence

from baton.service.clock import now
from gateway.link.mailbox import EventSink

# Writing a message takes a core about 60 us, 35 of them in gRPC alone. Up to here there is time to write one for each.
FREE_TOKENS_PER_S = 8_000
# From a token's arrival to its message; 128 messages at a time, the network and the client come on top of it.
LONGEST_S = 0.015
_AT_ONCE = 16  # messages that are written before anything else is looked at
_WINDOW_S = 0.25
_STEP_SHARE, _LONGEST_STEP_S = 0.1, 0.1  # of one interval in the mean; a longer one was a rest


class TokenBatching:
    """Belongs to the event loop; shared by all workers of a gateway."""

    def __init__(self) -> None:
        self.is_busy = False  # more tokens come than messages could be written
        self._num_tokens = 0
        self._since = now()
        self._due: deque[EventSink] = deque()
        self._held: deque[tuple[float, Sequence[EventSink]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, num_tokens: int, at: float) -> None:
        """Count the tokens that have come at `at` (time.monotonic())."""
        self._num_tokens += num_tokens
        if (elapsed := at - self._since) >= _WINDOW_S:
            self.is_busy = self._num_tokens > FREE_TOKENS_PER_S * elapsed
            self._num_tokens, self._since = 0, at

    def send(self, mailboxes: Sequence[EventSink]) -> None:
        """Write what has come into these, in their order. Where steps come faster than messages can be written, one
        that waits here takes the tokens of the next step along."""
        if mailboxes and not self._due:
            asyncio.get_running_loop().call_soon(self._send_some)
        self._due.extend(mailboxes)

    def _send_some(self) -> None:
        num_left = _AT_ONCE
        try:
            while self._due and num_left:
                num_left -= self._due.popleft().flush()
        finally:  # also behind one that has failed: no other would be written again
            if self._due:
                asyncio.get_running_loop().call_soon(self._send_some)

    def hold(self, mailboxes: Sequence[EventSink]) -> None:
        """Let what has come into these wait for more, at most LONGEST_S: the next step may never come."""
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
    """The turns of one worker's sequences: each has one in `every` steps, about as many in each step, so that the
    messages of a step are spread over the time to the next."""

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

    def is_turn_of(self, place: int) -> bool:
        """Return whether it is the turn of `place`, any number that is the same at every step."""
        return (self._number + place) % self._every == 0

    def end(self, due: Sequence[EventSink], held: Sequence[EventSink]) -> None:
        """End the step: `due` write now, `held` wait."""
        self._batching.send(due)
        if held:
            self._batching.hold(held)
