"""Chat templates, rendered exactly as transformers.apply_chat_template does.

A template comes with the model and runs in Jinja's sandbox; messages come from clients and are values only.
"""

import itertools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols

from gateway.text.template_sandbox import MAX_CHARS, TemplateSandbox

JsonObject = dict[str, Any]


class TemplateFailed(Exception):
    """The template refuses these messages; the message is its own words, one line."""


class ChatToolCall(NamedTuple):
    id: str
    name: str
    arguments: JsonObject


class ChatMessage(NamedTuple):
    role: str
    content: str
    tool_calls: tuple[ChatToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""

    def values(self) -> JsonObject:
        """Return the message as templates know it; what it has not is not there."""
        values: JsonObject = {"role": self.role, "content": self.content}
        if self.tool_calls:
            values["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            values["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            values["reasoning_content"] = self.reasoning
        return values


class Words(NamedTuple):
    """What the sender of a conversation wrote: all of it, and the keys of objects alone."""

    texts: list[str]
    keys: list[str]


class ChatOptions(NamedTuple):
    """What a conversation has beside its messages."""

    tools: tuple[JsonObject, ...] = ()  # name, description and parameters of each
    kwargs: JsonObject = {}
    continues: bool = False  # the last message, instead of beginning an answer
    callable_tools: tuple[str, ...] = ()  # those that the answer may call
    must_call: bool = False
    is_parallel: bool = True  # an answer may have several calls
    streams_arguments: bool = False  # of calls, instead of each call whole
    strict_tools: tuple[str, ...] = ()  # those whose calls keep to their parameters also where the answer may be text

    @property
    def loose_tools(self) -> set[str]:
        """Return those that the answer may call and that are not strict."""
        return set(self.callable_tools).difference(self.strict_tools)


class Conversation(NamedTuple):
    messages: tuple[ChatMessage, ...]
    options: ChatOptions = ChatOptions()

    @property
    def words(self) -> Words:
        """Return what its sender wrote, found in one go: its objects may have 100,000 parts."""
        texts, keys = list[str](), list[str]()
        rest: list[object] = [self.options.tools, self.options.kwargs]
        for message in self.messages:
            rest += message.content, message.reasoning, message.tool_call_id, message.tool_calls
        while rest:
            value = rest.pop()
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, dict):
                keys += value
                rest += value.values()
            elif isinstance(value, list | tuple):
                rest += value
        return Words(texts + keys, keys)


NO_OPTIONS = ChatOptions()
# What a template is given in any case.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str]):
        """Raises TemplateFailed when the template does not compile."""
        self._special_tokens = special_tokens
        # By name: a template that does not know them would leave them out of the prompt without a word.
        self.takes_tools, self.takes_tool_calls = "tools" in source, "tool_calls" in source
        self._knows_developer = "developer" in source
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # nesting without end is a RecursionError, a MemoryError or a SyntaxError
            raise TemplateFailed(_one_line(error)) from None

    def names(self, name: str) -> bool:
        """Return whether a variable of this name is the gateway's own to give."""
        return name in RESERVED or name in self._special_tokens

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS) -> str:
        """Return the prompt, with the head of the answer added, or up to the end of the last message where that is to be
        continued. Raises TemplateFailed, also for a rendering that would not end."""
        if not options.continues:
            return self._written(messages, options)
        # As transformers cuts: behind the content, and where the template trims that, before the white space at its end.
        (tag,) = unused_marks(1, texts_of(messages, options))
        last = messages[-1]._replace(content=f"{messages[-1].content}{tag} ")
        head, found, tail = self._written([*messages[:-1], last], options).rpartition(tag)
        if not found:
            raise TemplateFailed("it does not write the message that is to be continued")
        return head if tail.startswith(" ") else head.rstrip()

    def _written(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        values = [message.values() for message in messages]
        if not self._knows_developer:
            values = [each | {"role": "system"} if each["role"] == "developer" else each for each in values]
        tools = [{"type": "function", "function": tool} for tool in options.tools] or None
        variables = TemplateSandbox.variables(
            **options.kwargs, messages=values, tools=tools, documents=None,
            add_generation_prompt=not options.continues, **self._special_tokens,
        )  # fmt: skip
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


def texts_of(messages: Sequence[ChatMessage], options: ChatOptions) -> list[str]:
    """Return all that clients wrote."""
    return Conversation(tuple(messages), options).words.texts


def unused_marks(number: int, texts: Sequence[str], text: str = "") -> tuple[str, ...]:
    """Return characters that occur nowhere: private ones, or, if a content has them all, of planes without an
    alphabet. A mebibyte cannot hold those too."""
    used = set(text).union(*texts)
    unassigned = itertools.chain(range(0xE000, 0xF8FF), range(0x40000, 0xE0000))
    return tuple(itertools.islice((c for c in map(chr, unassigned) if c not in used), number))


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
