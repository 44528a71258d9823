"""Whose control tokens those of a rendered conversation are: what clients write never becomes one.

A second rendering carries marks, characters that occur nowhere else: around each text of clients, and within it around each
control token that it spells. Between two marks all characters are of one origin, whatever a template does to a text as a
whole, or if it cuts one at a control token:

    [text (token) text]   template   [text (    template    ) text]   template

A template that writes the token at which it cut, and nothing else, has written what the client did: that is the client's.
"""

import itertools
import re
from collections.abc import Sequence
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

_INSIDE, _STILL_INSIDE = ("[", ")"), ("]", "(")  # marks before and behind what is a client's


class Rendered(NamedTuple):
    """`of_template`: the control tokens in `text`, in order, that are the template's own; None: nobody can tell."""

    text: str
    of_template: tuple[Match, ...] | None


def render_origins(
    template: ChatTemplate, controls: ControlTokens, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS
) -> Rendered:
    """Render, and say which control tokens are the template's. Raises TemplateFailed."""
    text = template.render(messages, options)
    marker = _Marker(controls, unused_marks(4, texts_of(messages, options), text))
    tools, kwargs = marker.value(list(options.tools)), marker.value(options.kwargs)
    try:
        marked = template.render(
            list(map(marker.message, messages)), options._replace(tools=tuple(tools), kwargs=kwargs)
        )
    except TemplateFailed:
        return Rendered(text, None)
    return Rendered(text, _of_template(text, marked, marker))


class _Marker:
    """Marks the texts of one conversation."""

    def __init__(self, controls: ControlTokens, characters: Sequence[str]):
        self.controls = controls
        self.names = dict(zip(characters, "[]()", strict=True))
        self._text_begin, self._text_end, self._begin, self._end = characters
        self.spelled: set[str] = set()  # all that stands between ( and )
        self.heads: set[str] = set()  # control tokens with which such a pair begins
        self.tails: set[str] = set()  # and ends

    def text(self, text: str) -> str:
        """Put the marks inside its outer white space, so that templates that trim see what they would see, and none into a
        word of which no control token is made, so that those that compare one do."""
        core = text.strip()
        if not core or (core.isidentifier() and not self.controls.contain(core)):
            return text
        head = text.index(core)
        return f"{text[:head]}{self._text_begin}{self._core(core)}{self._text_end}{text[head + len(core) :]}"

    def value(self, value: Any) -> Any:
        """Return a value of JSON with its texts marked; of keys, which templates ask for, those that would be a control
        token between brackets."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self._key(key): self.value(each) for key, each in value.items()}
        return list(map(self.value, value)) if isinstance(value, list) else value

    def message(self, message: ChatMessage) -> ChatMessage:
        calls = (
            ChatToolCall(self.text(call.id), self.text(call.name), self.value(call.arguments))
            for call in message.tool_calls
        )
        texts = message.content, message.tool_call_id, message.reasoning, message.name
        content, *others = map(self.text, texts)
        return ChatMessage(message.role, content, tuple(calls), *others)

    def _key(self, key: str) -> str:
        return f"{self._text_begin}{key}{self._text_end}" if self.controls.may_name(key) else key

    def _core(self, text: str) -> str:
        pieces, position = [], 0
        for begin, end in self._units(text):
            spelled = text[begin:end]
            self.spelled.add(spelled)
            pieces += text[position:begin], self._begin, spelled, self._end
            position = end
        return "".join((*pieces, text[position:]))

    def _units(self, text: str) -> list[Match]:
        """Return the control tokens; two with nothing or white space between them are one: a template may ask whether there
        is something."""
        units, is_pair = list[Match](), False
        for found in self.controls.find(text):
            if units and not is_pair and not text[units[-1].end : found.begin].strip():
                self.heads.add(text[units[-1].begin : units[-1].end])
                self.tails.add(text[found.begin : found.end])
                units[-1], is_pair = Match(units[-1].begin, found.end), True
            else:
                units.append(found)
                is_pair = False
        return units


def _of_template(text: str, marked: str, marker: _Marker) -> tuple[Match, ...] | None:
    """Find control tokens between each two marks, and leave out those that are clients': whole texts, tokens that came out
    between their marks, and what is left of a pair of tokens that was cut between them."""
    pieces = re.split(f"([{''.join(marker.names)}])", marked)
    names = ["", *(marker.names[mark] for mark in pieces[1::2]), ""]
    found, position = list[Match](), 0
    for (before, behind), piece in zip(itertools.pairwise(names), pieces[::2], strict=True):
        here = marker.controls.find(piece)
        if here and (before in _INSIDE) != (behind in _STILL_INSIDE):
            return None  # a text was cut where it has no marks
        if before in _INSIDE or (before + behind == "()" and piece in marker.spelled):
            here = []
        if before == "(" and here and here[0].begin == 0 and piece[: here[0].end] in marker.heads:
            del here[0]
        if behind == ")" and here and here[-1].end == len(piece) and piece[here[-1].begin :] in marker.tails:
            del here[-1]
        found += (Match(position + begin, position + end) for begin, end in here)
        position += len(piece)
    return _moved(found, "".join(pieces[::2]), text)


def _moved(found: Sequence[Match], bare: str, text: str) -> tuple[Match, ...] | None:
    """Return the places in `text` of what was found in `bare`, which may have more white space: beside a mark the template
    could not trim it. None where they differ otherwise."""
    if bare == text:
        return tuple(found)
    if "".join(bare.split()) != "".join(text.split()):
        return None
    places = [place for place, character in enumerate(text) if not character.isspace()]
    moved, rank, position = list[Match](), 0, 0
    for begin, end in found:
        rank += len("".join(bare[position:begin].split()))
        position, word = begin, bare[begin:end]
        here = places[rank] if rank < len(places) else len(text)
        if not text.startswith(word, here):
            return None
        moved.append(Match(here, here + len(word)))
    return tuple(moved)
