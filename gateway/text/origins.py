"""Whose control tokens those of a rendered conversation are: what clients write never becomes one.

A second rendering carries marks around each text of clients, and around each control token that is spelled in one. A control
token that comes out between its marks, or with a mark inside, is the client's, any other one the template's. A template
that cuts a text, at `</think>` say, and writes its own `</think>` between the parts, cannot take the marks along.
"""

import itertools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gateway.text.control_tokens import ControlTokens, Match
from gateway.text.templates import (
    NO_OPTIONS,
    ChatMessage,
    ChatOptions,
    ChatTemplate,
    ChatToolCall,
    TemplateFailed,
    texts_of,
    unused_marks,
)


class Rendered(NamedTuple):
    """`of_clients` are the control tokens in `text`, in order, that clients spelled; None: nobody can tell."""

    text: str
    of_clients: tuple[Match, ...] | None


def render_origins(
    template: ChatTemplate, controls: ControlTokens, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS
) -> Rendered:
    """Render, and say which control tokens came from clients. Raises TemplateFailed."""
    text = template.render(messages, options)
    begin, end = unused_marks(texts_of(messages, options), text)

    def mark(text: str) -> str:
        """Inside its outer white space, so that templates that trim see what they would see."""
        core = text.strip()
        if not core:
            return text
        head = text.index(core)
        return f"{text[:head]}{begin}{_surround(core, controls.find(core), begin, end)}{end}{text[head + len(core) :]}"

    further = options._replace(tools=tuple(_each(list(options.tools), mark)), kwargs=_each(options.kwargs, mark))
    try:
        marked = template.render([_each_text(message, mark) for message in messages], further)
    except TemplateFailed:
        return Rendered(text, None)
    return Rendered(text, _of_clients(text, marked, controls, begin, end))


def _of_clients(text: str, marked: str, controls: ControlTokens, begin: str, end: str) -> tuple[Match, ...] | None:
    pieces = re.split(f"([{begin}{end}])", marked)
    bare = "".join(pieces[::2])
    in_text, in_bare = controls.find(text), controls.find(bare)
    words = [text[found.begin : found.end] for found in in_text]
    # A template cannot trim a text that it cuts beside a mark: white space may differ.
    if bare != text and (any(map(_has_space, words)) or "".join(bare.split()) != "".join(text.split())):
        return None
    if words != [bare[found.begin : found.end] for found in in_bare]:
        return None
    marks_at: dict[int, str] = defaultdict(str)
    for position, mark in zip(itertools.accumulate(map(len, pieces[::2])), pieces[1::2]):
        marks_at[position] += mark
    places = sorted(marks_at)

    def is_clients(found: Match) -> bool:
        next_place = bisect_right(places, found.begin)
        if next_place < len(places) and places[next_place] < found.end:
            return True
        return marks_at.get(found.begin, "").endswith(begin) and marks_at.get(found.end, "").startswith(end)

    return tuple(here for here, there in zip(in_text, in_bare, strict=True) if is_clients(there))


def _has_space(word: str) -> bool:
    return any(map(str.isspace, word))


def _surround(text: str, found: Sequence[Match], begin: str, end: str) -> str:
    pieces, position = [], 0
    for each in found:
        pieces += text[position : each.begin], begin, text[each.begin : each.end], end
        position = each.end
    return "".join((*pieces, text[position:]))


def _each_text(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    calls = (
        ChatToolCall(change(call.id), change(call.name), _each(call.arguments, change)) for call in message.tool_calls
    )
    content, reasoning, id_ = map(change, (message.content, message.reasoning, message.tool_call_id))
    return ChatMessage(message.role, content, tuple(calls), id_, reasoning)


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with each text of it changed, keys of objects left as they are: templates ask for them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(each, change) for key, each in value.items()}
    return [_each(each, change) for each in value] if isinstance(value, list) else value
