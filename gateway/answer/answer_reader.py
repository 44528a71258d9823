"""How the answers of one model are read: as plain text, or by the parser of its chat template's form."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gateway.parsers.answer_parser import AnswerParser
from gateway.parsers.formats import AnswerFormat
from gateway.text.detokenizer import Detokenizer
from gateway.text.templates import Conversation
from gateway.text.tokenizer import Tokenizer

_FIRST = 0x10F000  # a private plane: the characters that stand for control tokens
_NUM_LAST = 8  # tokens of the prompt that may begin the reasoning


class ReaderForm(NamedTuple):
    """How the answer of one request is read. `new_parser` None: as plain text."""

    detokenizer: Detokenizer
    new_parser: Callable[[], AnswerParser] | None = None
    ends_with_call: bool = False  # the first one


class AnswerReader:
    """Choose how an answer is read. Belongs to the event loop."""

    def __init__(self, tokenizer: Tokenizer, plain: Detokenizer, form: AnswerFormat | None):
        """`form`: of the chat template; None: its answers are plain text."""
        self._plain, self._form = ReaderForm(plain), form
        markers = form.markers if form else ()
        ids = {token["content"]: token_id for token_id, token in tokenizer.added.items()}
        controls = [(marker, ids[marker]) for marker in markers if marker in ids]
        self._spellings = {chr(_FIRST + index): marker for index, (marker, _) in enumerate(controls)}
        characters = {token_id: chr(_FIRST + index) for index, (_, token_id) in enumerate(controls)}
        self._detokenizer = Detokenizer(tokenizer, characters)

    def form_of(self, conversation: Conversation | None, prompt_ids: Sequence[int]) -> ReaderForm:
        """Return how an answer to this prompt is read. What continues a text has no form."""
        form = self._form
        if form is None or conversation is None:
            return self._plain
        options = conversation.options
        tools = {tool["name"]: tool["parameters"] for tool in options.tools} if options.calls else {}
        shown = self._plain.detokenizer.shown
        prompt_end = b"".join(shown(token_id)[1] for token_id in prompt_ids[-_NUM_LAST:]).decode(errors="replace")
        new_parser = partial(form.parser, self._spellings, tools, prompt_end)
        return ReaderForm(self._detokenizer, new_parser, bool(tools) and not options.is_parallel)
