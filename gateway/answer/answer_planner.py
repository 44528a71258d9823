"""Plan how an answer of one model is read: as plain text, or by the parser of its chat template's format."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from baton.constraints.constraint import MAX_BYTES, BadConstraint, Constraint
from baton.constraints.json_schema import check_schema
from baton.constraints.loosening import loosened
from baton.service.errors import InvalidRequest
from gateway.parsers.answer_grammar import GrammarAsked, answer_grammar, of_object
from gateway.parsers.answer_parser import NO_SPELLINGS, AnswerParser
from gateway.parsers.formats import AnswerFormat
from gateway.text.detokenizer import Detokenizer
from gateway.text.templates import ChatOptions, Conversation
from gateway.text.tokenizer import Tokenizer

_FIRST = 0x10F000  # of a private plane: characters that stand for control tokens
_NUM_LAST = 8  # tokens at the end of the prompt that may open the reasoning


class AnswerPlan(NamedTuple):
    """How the answer of one request is read."""

    detokenizer: Detokenizer
    new_parser: Callable[[], AnswerParser] | None = None  # None: it is plain text
    ends_with_call: bool = False  # the first call ends it
    streams_arguments: bool = False  # arguments of a call are sent as they come
    constraint: Constraint | None = None  # of the whole answer, reasoning and calls included
    spellings: Mapping[str, str] = NO_SPELLINGS  # from characters that stand for control tokens to their text
    keeps_space: bool = False  # a space before the first word stays: it continues a text, or a grammar requires it


class AnswerPlanner:
    """Choose how answers of one model are read. It is used by the event loop only."""

    def __init__(self, tokenizer: Tokenizer, plain: Detokenizer, answer_format: AnswerFormat | None):
        """`answer_format`: the chat template's; None: answers are plain text."""
        self._plain, self._format = plain, answer_format
        ids = {token["content"]: token_id for token_id, token in tokenizer.added.items()}
        self._control_ids = {
            marker: ids[marker] for marker in (answer_format.markers if answer_format else ()) if marker in ids
        }
        self._spellings = {chr(_FIRST + index): marker for index, marker in enumerate(self._control_ids)}
        characters = dict(zip(self._control_ids.values(), self._spellings, strict=True))
        self._detokenizer = Detokenizer(tokenizer, characters)

    def plan_for(
        self,
        conversation: Conversation | None,
        prompt_ids: Sequence[int],
        constraint: Constraint | None = None,
        kept: Collection[str] | None = None,
    ) -> AnswerPlan:
        """Return how an answer to this prompt is read; without a conversation it is plain text. Calls of tools that are
        not strict follow their schemas as far as possible: those in `kept`, or all if it is None. Raises InvalidRequest
        for what the model's format cannot do."""
        answer_format = self._format
        if conversation is None:
            keeps_space = constraint is not None or self._plain.has_text(prompt_ids)
            return AnswerPlan(self._plain, constraint=constraint, keeps_space=keeps_space)
        options = conversation.options
        keeps_space = constraint is not None or options.continues
        _check_format(answer_format, options)
        if answer_format is None:
            return AnswerPlan(self._plain, constraint=constraint, keeps_space=keeps_space)
        tools = {tool["name"]: tool["parameters"] for tool in options.tools if tool["name"] in options.callable_tools}
        prompt_end = b"".join(self._plain.shown(id_)[1] for id_ in prompt_ids[-_NUM_LAST:]).decode(errors="replace")
        if options.must_call and constraint is not None:
            raise InvalidRequest("constraint", "is of an answer that has to be calls")
        # An answer that continues a text has no grammar beside its constraint, and in harmony no calls.
        if not options.continues or (constraint is None and not answer_format.is_harmony):
            asked = _grammar_asked(answer_format, options, tools, constraint, kept)
            grammar = answer_grammar(answer_format, self._control_ids, prompt_end, asked)
            constraint = Constraint("grammar", grammar) if grammar else constraint
        ends_with_call = bool(tools) and not options.is_parallel
        new_parser = partial(answer_format.parser, self._spellings, tools, prompt_end, options.continues)
        streams = options.streams_arguments
        return AnswerPlan(
            self._detokenizer, new_parser, ends_with_call, streams, constraint, self._spellings, keeps_space
        )

    def can_call(self, name: str) -> bool:
        """Return whether an answer can call a tool of this name."""
        return self._format is not None and self._format.can_call(name)

    def grammar_of_tool(self, conversation: Conversation, name: str) -> Constraint:
        """Return the grammar of a call of one tool that can be called, with its schema as far as it can be enforced.
        Raises InvalidRequest."""
        assert self._format is not None and self._format.can_call(name)
        parameters = next(tool["parameters"] for tool in conversation.options.tools if tool["name"] == name)
        asked = GrammarAsked({name: _loosened(name, parameters)}, True, False, None, (name,))
        return Constraint("grammar", answer_grammar(self._format, self._control_ids, "", asked) or "")


def _grammar_asked(
    answer_format: AnswerFormat,
    options: ChatOptions,
    tools: Mapping[str, Mapping[str, Any]],
    constraint: Constraint | None,
    kept: Collection[str] | None,
) -> GrammarAsked:
    """Return what the grammar of an answer has to enforce. `tools`: schemas of those that may be called; `kept`: those
    that are not strict and whose schemas are enforced, None: all. Raises InvalidRequest."""
    bound = set(options.strict_tools)
    if options.must_call or constraint is not None:
        bound |= tools.keys() if kept is None else tools.keys() & kept
    schemas = {name: each if name in bound else None for name, each in tools.items() if answer_format.can_call(name)}
    _check_tools(options, [name for name, each in schemas.items() if each is not None])
    loose = bound.difference(options.strict_tools)
    schemas |= {name: _loosened(name, tools[name]) for name in loose & schemas.keys()}
    return GrammarAsked(schemas, options.must_call, options.is_parallel, constraint, loose)


def _check_format(answer_format: AnswerFormat | None, options: ChatOptions) -> None:
    """Check that the format allows the calls that the client asks for. Raises InvalidRequest."""
    name = f"the form of this model's answers ({answer_format.name})" if answer_format else "this model's chat template"
    if answer_format is None or answer_format.calls is None:
        if options.must_call:
            raise InvalidRequest("messages.tool_choice", f"must be auto or none: {name} has no calls that are known")
        return
    can_call = any(map(answer_format.can_call, options.callable_tools))
    needed = options.strict_tools if can_call or not options.must_call else options.callable_tools
    for index, tool in enumerate(options.tools):
        if tool["name"] in needed and not answer_format.can_call(tool["name"]):
            raise InvalidRequest(
                f"messages.tools[{index}].name",
                f"cannot be called in {name}: {tool['name']!r} is no name in Python (letters, digits and _, and no keyword)",
            )


def _check_tools(options: ChatOptions, bound: Collection[str]) -> None:
    """Check the schemas of the tools whose calls the grammar binds. Raises InvalidRequest."""
    called = [(index, tool) for index, tool in enumerate(options.tools) if tool["name"] in bound]
    if (num_bytes := parameter_bytes(options, bound)) > MAX_BYTES:  # 720 kB took 0.45 s to walk
        raise InvalidRequest("messages.tools", f"have parameters of {num_bytes} bytes, at most {MAX_BYTES} are allowed")
    for index, tool in called:
        if tool["name"] not in options.strict_tools:
            continue
        where, types = f"messages.tools[{index}].parameters", tool["parameters"].get("type", "object")
        if problem := check_schema(of_object(tool["parameters"])):
            place, reason = problem
            raise InvalidRequest(where, f"{place}: {reason}" if place else reason)
        if "object" not in (types if isinstance(types, list) else [types]):
            raise InvalidRequest(where, "/type: must be object, which arguments are")


def parameter_bytes(options: ChatOptions, names: Collection[str]) -> int:
    """Return the total size of the schemas of these tools, in characters of JSON."""
    return sum(len(json.dumps(tool["parameters"])) for tool in options.tools if tool["name"] in names)


def _loosened(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a tool's schema that can be enforced. Raises InvalidRequest if nothing satisfies it."""
    try:
        return loosened(of_object(parameters))
    except BadConstraint as error:
        raise InvalidRequest("messages.tools", f"{name}: {error}") from None
