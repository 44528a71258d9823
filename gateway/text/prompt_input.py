"""A prompt as a client gives it, which is not tokens yet."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.text.templates import Conversation


class PromptInput(NamedTuple):
    """Exactly one is not None; none where the content is not kept."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Conversation | None = None

    @property
    def field(self) -> str:
        """The field of the request that it came in, for errors."""
        return "text" if self.text is not None else "messages" if self.messages is not None else "token_ids"
