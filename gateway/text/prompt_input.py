"""A prompt as a client sends it, before it is tokenized."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.text.templates import Conversation


class PromptInput(NamedTuple):
    """A prompt in one of three forms: exactly one field is not None, or none once the content is no longer kept."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Conversation | None = None

    @property
    def field(self) -> str:
        """The field of the request that held the prompt, for errors."""
        return "text" if self.text is not None else "messages" if self.messages is not None else "token_ids"
