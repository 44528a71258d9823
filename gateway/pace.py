"""How long tokens wait for the next ones of their choice, so that one message carries them all."""

from gateway.timing import now

# Writing a message takes the gateway three times as long as reading a token. Up to here it can write one for each.
FREE_TOKENS_PER_S = 8_000
LONGEST_S = 0.015  # a token is on its way for 20 ms at most (p99), a busy event loop and the network included
_WINDOW_S = 0.1


class Pace:
    """Shared by all requests of a gateway. Belongs to the event loop."""

    def __init__(self) -> None:
        self.gap_s = 0.0  # from the first token of a message to its sending
        self._num_tokens = 0
        self._since = now()

    def count(self, num_tokens: int) -> None:
        """So many tokens are about to go out."""
        self._num_tokens += num_tokens
        if (elapsed := now() - self._since) >= _WINDOW_S:
            self.gap_s = LONGEST_S if self._num_tokens > FREE_TOKENS_PER_S * elapsed else 0.0
            self._num_tokens, self._since = 0, self._since + elapsed
