"""Find which control tokens of a rendered conversation the template wrote: what clients write never becomes one.

The conversation is rendered a second time with marks, which are characters that occur nowhere else: around each text of
a client, and within it around each control token that it spells. All characters between two marks then have the same
origin, even if the template changes a text as a whole or cuts it at a control token:

    [text (token) text]   template   [text (    template    ) text]   template

If a template cuts a text at a control token and writes that same token there, and nothing else, the token counts as the
client's.

A template may measure or compare texts, and write something else because of the marks. Therefore a third rendering has
masks: in each text of a client, every sign that control tokens are made of is replaced by a character that occurs
nowhere else. If this rendering, unmasked, equals the first one, the control tokens left in it are the template's.
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

_INSIDE, _STILL_INSIDE = ("[", ")"), ("]", "(")  # names of marks before and behind what is a client's


class Rendered(NamedTuple):
    """A rendered conversation. `of_template`: the control tokens in `text` that the template wrote, in order; None:
    they cannot be told from the clients'."""

    text: str
    of_template: tuple[Match, ...] | None


def render_origins(
    template: ChatTemplate, controls: ControlTokens, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS
) -> Rendered:
    """Render a conversation and find which control tokens the template wrote. Raises TemplateFailed."""
    text = template.render(messages, options)
    characters = unused_marks(4 + len(controls.characters), texts_of(messages, options), text)
    for disguise in (_Marks(controls, characters[:4]), _Masks(controls, characters[4:])):
        with contextlib.suppress(TemplateFailed):
            disguised = template.render(list(map(disguise.message, messages)), disguise.options(options))
            if (of_template := disguise.of_template(text, disguised)) is not None:
                return Rendered(text, of_template)
    return Rendered(text, None)


class _Disguise(abc.ABC):
    """Change the clients' texts of one conversation so that they differ from what the template writes."""

    def __init__(self, controls: ControlTokens):
        self.controls = controls

    @abc.abstractmethod
    def text(self, text: str) -> str:
        """Return a text of a client in disguise."""

    @abc.abstractmethod
    def of_template(self, text: str, disguised: str) -> tuple[Match, ...] | None:
        """Return the control tokens that the template wrote in `text`, the plain rendering; None if `disguised`, the
        rendering of the disguised texts, does not show them."""

    def value(self, value: Any) -> Any:
        """Return a JSON value with its texts disguised. Templates look keys up, so a key is disguised only if it would
        spell a control token between brackets."""
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
    """Put marks around the clients' texts, and around the control tokens within them."""

    def __init__(self, controls: ControlTokens, characters: Sequence[str]):
        super().__init__(controls)
        self.names = dict(zip(characters, "[]()", strict=True))
        self._text_begin, self._text_end, self._begin, self._end = characters
        self.spelled: set[str] = set()  # what was put between ( and )
        self.heads: set[str] = set()  # first control tokens of such a pair
        self.tails: set[str] = set()  # last ones

    def text(self, text: str) -> str:
        """Return the text with marks inside its outer white space, which a template may trim.

        A text that can be no part of a control token is returned unchanged, so that templates can compare and measure
        it."""
        core = text.strip()
        if not core or (self.controls.signs.isdisjoint(core) and not self.controls.contain(core)):
            return text
        head = text.index(core)
        return f"{text[:head]}{self._text_begin}{self._core(core)}{self._text_end}{text[head + len(core) :]}"

    def of_template(self, text: str, disguised: str) -> tuple[Match, ...] | None:
        """Return the control tokens between marks, without the clients': those within a text, those that came out
        between their own marks, and the rest of a pair of tokens that the template cut in two."""
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
        """Return the control tokens of a text. Two with only white space between them are one unit, since a template
        may test whether there is anything between them."""
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
    """Replace the signs of control tokens in the clients' texts by characters that occur nowhere else."""

    def __init__(self, controls: ControlTokens, characters: Sequence[str]):
        super().__init__(controls)
        self._masks = dict(zip(sorted(controls.characters), characters, strict=True))
        self._hide = str.maketrans({sign: self._masks[sign] for sign in controls.signs})
        self._show = str.maketrans({mask: character for character, mask in self._masks.items()})

    def text(self, text: str) -> str:
        """Return the text with its signs masked; if it is a part of a control token, which a template could complete,
        also with its first character masked."""
        core = text.strip()
        if core and self.controls.contain(core):
            text = text.replace(core[0], self._masks[core[0]], 1)
        return text.translate(self._hide)

    def of_template(self, text: str, disguised: str) -> tuple[Match, ...] | None:
        return tuple(self.controls.find(disguised)) if disguised.translate(self._show) == text else None


def _moved(found: Sequence[Match], bare: str, text: str) -> tuple[Match, ...] | None:
    """Return where the matches found in `bare` are in `text`, or None if the two differ in more than white space.

    `bare` may have more white space, since a template cannot trim it beside a mark."""
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
