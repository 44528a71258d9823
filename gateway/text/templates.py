"""Chat templates, rendered exactly as transformers.apply_chat_template does, with the origin of every character.

A template comes with the model and runs in Jinja's sandbox; messages come from clients and are values only.
"""

import itertools
import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols

from gateway.text.template_sandbox import MAX_CHARS, TemplateSandbox


class TemplateFailed(Exception):
    """The template refuses these messages; the message is its own words, one line."""


class ChatMessage(NamedTuple):
    role: str
    content: str


class Rendered(NamedTuple):
    """`spans` are the [begin, end) of `text` that came from message contents; None: they cannot be distinguished."""

    text: str
    spans: tuple[tuple[int, int], ...] | None


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str]):
        """Raises TemplateFailed when the template does not compile."""
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # nesting without end is a RecursionError, a MemoryError or a SyntaxError
            raise TemplateFailed(_one_line(error)) from None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt, with the head of the answer added. Raises TemplateFailed, also for a rendering that would
        not end."""
        values = [{"role": message.role, "content": message.content} for message in messages]
        variables = TemplateSandbox.variables(
            messages=values, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
        )
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                if (num_chars := num_chars + len(piece)) > MAX_CHARS:
                    raise TemplateFailed(f"it renders more than {MAX_CHARS} characters for this conversation")
        except TemplateFailed:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise TemplateFailed(_one_line(error)) from None
        return "".join(pieces)

    def render_spans(self, messages: Sequence[ChatMessage]) -> Rendered:
        """Render, and say which characters came from contents.

        A second rendering carries marks around each content, inside its outer white space, so that templates that
        trim see what they would see. If it does not come out as the first one with marks, the spans are None.
        """
        text = self.render(messages)
        begin, end = _unused_marks(messages, text)
        marked = [message._replace(content=_mark(message.content, begin, end)) for message in messages]
        try:
            pieces = re.split(f"([{begin}{end}])", self.render(marked))
        except TemplateFailed:
            return Rendered(text, None)
        if "".join(pieces[::2]) != text:
            return Rendered(text, None)
        return Rendered(text, _spans(pieces, begin))


def _spans(pieces: list[str], begin: str) -> tuple[tuple[int, int], ...]:
    """`pieces` alternate between text and a mark."""
    spans, position, depth = [], 0, 0
    for piece, mark in itertools.zip_longest(pieces[::2], pieces[1::2]):
        if depth > 0 and piece:
            spans.append((position, position + len(piece)))
        position += len(piece)
        depth += 0 if mark is None else 1 if mark == begin else -1
    return tuple(spans)


def _mark(content: str, begin: str, end: str) -> str:
    core = content.strip()
    if not core:
        return content
    head = content.index(core)
    return f"{content[:head]}{begin}{core}{end}{content[head + len(core) :]}"


def _unused_marks(messages: Sequence[ChatMessage], text: str) -> tuple[str, str]:
    """Return two characters that occur nowhere: private ones, or, if a content has them all, of planes without an
    alphabet. A mebibyte cannot hold those too."""
    used = set(text).union(*(message.content for message in messages))
    unassigned = itertools.chain(range(0xE000, 0xF8FF), range(0x40000, 0xE0000))
    first, second = itertools.islice((c for c in map(chr, unassigned) if c not in used), 2)
    return first, second


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote, for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> TemplateSandbox:
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
