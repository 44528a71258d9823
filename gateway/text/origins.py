"""Whose control tokens those of a rendered conversation are: what clients write never becomes one.

A second rendering carries marks, characters that occur nowhere else: around each text of clients, and within it around
each control token that it spells. Between two marks all characters are of one origin, whatever a template does to a
text as a whole, or if it cuts one at a control token:

    [text (token) text]   template   [text (    template    ) text]   template

A template that writes the token at which it cut, and nothing else, has written what the client did: that is the
client's.

Where a template measures or compares what has marks, a third rendering has masks: in place of each sign of which
control tokens are made, in each text of clients, another character that occurs nowhere else. Where it is the first one
but for these, the control tokens in it are the template's.
"""

import abc
import contextlib
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
    characters = unused_marks(4 + len(controls.characters), texts_of(messages, options), text)
    for disguise in (_Marks(controls, characters[:4]), _Masks(controls, characters[4:])):
        with contextlib.suppress(TemplateFailed):
            disguised = template.render(list(map(disguise.message, messages)), disguise.options(options))
            if (of_template := disguise.of_template(text, disguised)) is not None:
                return Rendered(text, of_template)
    return Rendered(text, None)


class _Disguise(abc.ABC):
    """The texts of one conversation, written so that what comes of them is told from what the template writes."""

    def __init__(self, controls: ControlTokens):
        self.controls = controls

    @abc.abstractmethod
    def text(self, text: str) -> str: ...

    @abc.abstractmethod
    def of_template(self, text: str, disguised: str) -> tuple[Match, ...] | None:
        """Return the control tokens in `text`, a rendering, that are the template's, by the one of disguised texts;
        None: it does not show them."""

    def value(self, value: Any) -> Any:
        """Return a value of JSON with its texts disguised; of keys, which templates ask for, those that would be a
        control token between brackets."""
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

    def options(self, options: ChatOptions) -> ChatOptions:
        return options._replace(tools=tuple(map(self.value, options.tools)), kwargs=self.value(options.kwargs))

    def _key(self, key: str) -> str:
        return self.text(key) if self.controls.may_name(key) else key


class _Marks(_Disguise):
    def __init__(self, controls: ControlTokens, characters: Sequence[str]):
        super().__init__(controls)
        self.names = dict(zip(characters, "[]()", strict=True))
        self._text_begin, self._text_end, self._begin, self._end = characters
        self.spelled: set[str] = set()  # all that stands between ( and )
        self.heads: set[str] = set()  # control tokens with which such a pair begins
        self.tails: set[str] = set()  # and ends

    def text(self, text: str) -> str:
        """Put the marks inside its outer white space, so that templates that trim see what they would see, and none
        into words of which no control token is made, so that those that compare or measure them do."""
        core = text.strip()
        if not core or (self.controls.signs.isdisjoint(core) and not self.controls.contain(core)):
            return text
        head = text.index(core)
        return f"{text[:head]}{self._text_begin}{self._core(core)}{self._text_end}{text[head + len(core) :]}"

    def of_template(self, text: str, disguised: str) -> tuple[Match, ...] | None:
        """Find control tokens between each two marks, and leave out those that are clients': whole texts, tokens that
        came out between their marks, and what is left of a pair of tokens that was cut between them."""
        pieces = re.split(f"([{''.join(self.names)}])", disguised)
        names = ["", *(self.names[mark] for mark in pieces[1::2]), ""]
        found, position = list[Match](), 0
        for (before, behind), piece in zip(itertools.pairwise(names), pieces[::2], strict=True):
            here = self.controls.find(piece)
            if here and (before in _INSIDE) != (behind in _STILL_INSIDE):
                return None  # a text was cut where it has no marks
            if before in _INSIDE or (before + behind == "()" and piece in self.spelled):
                here = []
            if before == "(" and here and here[0].begin == 0 and piece[: here[0].end] in self.heads:
                del here[0]
            if behind == ")" and here and here[-1].end == len(piece) and piece[here[-1].begin :] in self.tails:
                del here[-1]
            found += (Match(position + begin, position + end) for begin, end in here)
            position += len(piece)
        return _moved(found, "".join(pieces[::2]), text)

    def _core(self, text: str) -> str:
        pieces, position = [], 0
        for begin, end in self._units(text):
            spelled = text[begin:end]
            self.spelled.add(spelled)
            pieces += text[position:begin], self._begin, spelled, self._end
            position = end
        return "".join((*pieces, text[position:]))

    def _units(self, text: str) -> list[Match]:
        """Return the control tokens; two with nothing or white space between them are one: a template may ask whether
        there is something."""
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


class _Masks(_Disguise):
    def __init__(self, controls: ControlTokens, characters: Sequence[str]):
        super().__init__(controls)
        self._masks = dict(zip(sorted(controls.characters), characters, strict=True))
        self._hide = str.maketrans({sign: self._masks[sign] for sign in controls.signs})
        self._show = str.maketrans({mask: character for character, mask in self._masks.items()})

    def text(self, text: str) -> str:
        """Mask the signs, and of a text that is within a control token, to which a template may add the rest, its first
        character."""
        core = text.strip()
        if core and self.controls.contain(core):
            text = text.replace(core[0], self._masks[core[0]], 1)
        return text.translate(self._hide)

    def of_template(self, text: str, disguised: str) -> tuple[Match, ...] | None:
        return tuple(self.controls.find(disguised)) if disguised.translate(self._show) == text else None


def _moved(found: Sequence[Match], bare: str, text: str) -> tuple[Match, ...] | None:
    """Return the places in `text` of what was found in `bare`, which may have more white space: beside a mark the
    template could not trim it. None where they differ otherwise."""
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
