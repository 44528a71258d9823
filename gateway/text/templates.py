"""Render chat templates exactly as transformers.apply_chat_template does.

A template comes with the model and runs in Jinja's sandbox; messages come from clients and are only values in it.
"""

import contextlib
import itertools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols

from baton.lines import describe_error
from gateway.text.template_sandbox import MAX_CHARS, TemplateSandbox

JsonObject = dict[str, Any]


class TemplateFailed(Exception):
    """The template refuses a conversation; the message is the template's own, on one line."""


class ChatToolCall(NamedTuple):
    """A call of a tool in an assistant's message."""

    id: str
    name: str
    arguments: JsonObject

    def values(self, form: "CallForm") -> JsonObject:
        """Return the called function in the form that templates expect."""
        arguments = json.dumps(self.arguments, ensure_ascii=False) if form.as_text else self.arguments
        return {"name": self.name, "arguments": arguments}


class CallForm(NamedTuple):
    """The form in which a template expects an assistant's message with tool calls."""

    content: str | None = ""  # of a message that has calls and no text
    as_text: bool = False  # arguments are a JSON text instead of an object
    is_apart: bool = False  # a text before the calls becomes a message of its own


PLAIN_CALLS = CallForm()


class ChatMessage(NamedTuple):
    """A message of a conversation, whose fields were checked."""

    role: str
    content: str
    tool_calls: tuple[ChatToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    name: str = ""

    @property
    def parts(self) -> tuple["ChatMessage", ...]:
        """The text and the calls as two messages; the message itself if it does not have both."""
        if not (self.tool_calls and self.content):
            return (self,)
        return self._replace(tool_calls=()), self._replace(content="", reasoning="")

    def values(self, form: CallForm = PLAIN_CALLS) -> JsonObject:
        """Return the message in the form that templates expect, without the fields that it does not have."""
        values: JsonObject = {"role": self.role, "content": self.content}
        if self.tool_calls:
            values["content"] = self.content or form.content
            values["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.values(form)} for call in self.tool_calls
            ]
        if self.tool_call_id:
            values["tool_call_id"] = self.tool_call_id
        if self.name:
            values["name"] = self.name
        if self.reasoning:
            values["reasoning_content"] = self.reasoning
            # The name that gpt-oss uses; its template refuses it beside a text before calls.
            if not (self.tool_calls and self.content):
                values["thinking"] = self.reasoning
        return values


class ClientTexts(NamedTuple):
    """What the client wrote in a conversation: all texts, and among them the keys of objects."""

    texts: list[str]
    keys: list[str]


class ChatOptions(NamedTuple):
    """The parts of a conversation beside its messages."""

    tools: tuple[JsonObject, ...] = ()  # name, description and parameters of each
    kwargs: JsonObject = {}
    continues: bool = False  # the answer continues the last message
    callable_tools: tuple[str, ...] = ()  # tools that the answer may call
    must_call: bool = False
    is_parallel: bool = True  # an answer may have several calls
    streams_arguments: bool = False  # the arguments of a call are sent in pieces, not whole
    strict_tools: tuple[str, ...] = ()  # calls of these match their schema even if the answer may be text

    @property
    def loose_tools(self) -> set[str]:
        """The tools that the answer may call and that are not strict."""
        return set(self.callable_tools).difference(self.strict_tools)


class Conversation(NamedTuple):
    """A prompt in messages."""

    messages: tuple[ChatMessage, ...]
    options: ChatOptions = ChatOptions()

    @property
    def client_texts(self) -> ClientTexts:
        """What the client wrote, found without recursion: its objects may have 100,000 parts."""
        texts, keys = list[str](), list[str]()
        rest: list[object] = [self.options.tools, self.options.kwargs]
        for message in self.messages:
            rest += message.content, message.reasoning, message.tool_call_id, message.name, message.tool_calls
        while rest:
            value = rest.pop()
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, dict):
                keys += value
                rest += value.values()
            elif isinstance(value, list | tuple):
                rest += value
        return ClientTexts(texts + keys, keys)


NO_OPTIONS = ChatOptions()
_PROBED_TOOL = "other_tool_0000"
_PROBED = ChatOptions(({"name": _PROBED_TOOL, "description": "", "parameters": {"type": "object", "properties": {}}},))
_SYSTEM = ("system", "developer")
# Variables that every template is given.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """The chat template of a model, and how it takes tools and their calls."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str | None = None):
        """Compile a template; `tool_source`, if given, is the one for conversations with tools. Raises TemplateFailed
        for a template that does not compile."""
        self._special_tokens = special_tokens
        self._for_tools = None if tool_source is None else ChatTemplate(tool_source, special_tokens)
        # Found by name: a template that does not use them would silently leave them out of the prompt.
        self.names_tools, self.takes_tool_calls = "tools" in source, "tool_calls" in source
        self._knows_developer = "developer" in source
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # nesting without end is a RecursionError, a MemoryError or a SyntaxError
            raise TemplateFailed(describe_error(error, 200)) from None
        self.takes_tools = self.names_tools and self._writes_tools()
        self.form = self._find_form() if self.takes_tool_calls else PLAIN_CALLS

    def of(self, options: ChatOptions) -> "ChatTemplate":
        """Return the template for a conversation with these options."""
        return self._for_tools if options.tools and self._for_tools is not None else self

    def names(self, name: str) -> bool:
        """Return whether the gateway itself gives templates a variable of this name."""
        return name in RESERVED or name in self._special_tokens

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS) -> str:
        """Return the prompt: with the head of the answer added, or up to the end of the last message if the answer
        continues that one.

        A conversation that the template refuses is rendered again in the form that the strictest templates accept
        (`in_turns`). Raises TemplateFailed, also for a rendering that would not end."""
        try:
            return self._render(messages, options)
        except TemplateFailed:
            if (turns := in_turns(messages)) == list(messages):
                raise
            return self._render(turns, options)

    def _render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        if not options.continues:
            return self._written(messages, options, self.form)
        # Cut where transformers does: behind the content or, if the template trims that, before its trailing white
        # space.
        (tag,) = unused_marks(1, texts_of(messages, options))
        last = messages[-1]._replace(content=f"{messages[-1].content}{tag} ")
        head, found, tail = self._written([*messages[:-1], last], options, self.form).rpartition(tag)
        if not found:
            raise TemplateFailed("it does not write the message that is to be continued")
        return head if tail.startswith(" ") else head.rstrip()

    def _writes_tools(self) -> bool:
        """Return whether the template writes the tools that it is given: some know another name for tools (SmolLM3), or
        look for them in a message (Phi-4-mini).

        A template that refuses every probe may take other tools, and reports itself what it wants."""
        written, user = list[str](), ChatMessage("user", "?")
        for chat in ((ChatMessage("system", "!"), user), (user,)):
            with contextlib.suppress(TemplateFailed):
                written.append(self._written(chat, _PROBED, PLAIN_CALLS))
        return not written or any(_PROBED_TOOL in text for text in written)

    def _find_form(self) -> CallForm:
        """Return the first form of calls in which the template writes a call.

        Some templates write a call only if the content is None, or join its arguments to a text (DeepSeek V3, R1).
        Others write an empty content as a message of its own; the shorter rendering has no such message."""
        for as_text in (False, True):
            forms = [CallForm(content, as_text) for content in ("", None)]
            written = {form: text for form in forms if (text := self._try_call(form))}
            if written:
                found = min(written, key=lambda form: len(written[form]))
                apart = found._replace(is_apart=True)
                return apart if not self._try_call(found, "text") and self._try_call(apart, "text") else found
        return PLAIN_CALLS

    def _try_call(self, form: CallForm, content: str = "") -> str:
        """Return the rendering of a conversation with a call in this form, or "" if the call is not in it unchanged."""
        call = ChatToolCall("probe0000", "probe", {"argument": "of the probe"})
        chat = (
            ChatMessage("user", "?"),
            ChatMessage("assistant", content, (call,)),
            ChatMessage("tool", "!", (), call.id),
        )
        for options in (_PROBED, NO_OPTIONS):
            with contextlib.suppress(TemplateFailed):
                text = self._written(chat, options, form)
                # Written as a Python dict, or as JSON within JSON.
                is_altered = "{'argument'" in text or '\\"argument' in text
                if not is_altered and all(word in text for word in (call.name, *call.arguments.values())):
                    return text
        return ""

    def _written(self, messages: Sequence[ChatMessage], options: ChatOptions, form: CallForm) -> str:
        if form.is_apart:
            messages = [part for message in messages for part in message.parts]
        values = [message.values(form) for message in messages]
        if not self._knows_developer:
            values = [each | {"role": "system"} if each["role"] == "developer" else each for each in values]
        tools = [{"type": "function", "function": tool} for tool in options.tools] or None
        variables = TemplateSandbox.variables(
            **options.kwargs,
            messages=values,
            tools=tools,
            documents=None,
            add_generation_prompt=not options.continues,
            **self._special_tokens,
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
            raise TemplateFailed(describe_error(error, 200)) from None
        return "".join(pieces)


def in_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation in the form that the strictest templates accept: one system message, at the beginning,
    and consecutive messages of the user joined. Later system messages become the user's."""
    behind = itertools.dropwhile(lambda message: message.role in _SYSTEM, messages)
    as_users = [each._replace(role="user") if each.role in _SYSTEM else each for each in behind]
    head = [each._replace(role="system") for each in messages[: len(messages) - len(as_users)]]
    turns = list[ChatMessage]()
    for role, group in itertools.groupby([*head, *as_users], lambda message: message.role):
        each = list(group)
        is_one = len(each) > 1 and role in ("system", "user")
        turns += [ChatMessage(role, "\n\n".join(message.content for message in each))] if is_one else each
    return turns


def texts_of(messages: Sequence[ChatMessage], options: ChatOptions) -> list[str]:
    """Return all texts that the client wrote."""
    return Conversation(tuple(messages), options).client_texts.texts


def unused_marks(number: int, texts: Sequence[str], text: str = "") -> tuple[str, ...]:
    """Return characters that occur in none of the texts: private ones or, if a text has all of those, unassigned ones,
    for which a mebibyte is too short."""
    used = set(text).union(*texts)
    unassigned = itertools.chain(range(0xE000, 0xF8FF), range(0x40000, 0xE0000))
    return tuple(itertools.islice((c for c in map(chr, unassigned) if c not in used), number))


class _Generation(Extension):
    """The tag {% generation %}, which marks an assistant's text for training: only its body is rendered."""

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
    """Return a value as JSON, as transformers does: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
