"""How the answers of one model are read: as plain text, or by the parser of its chat template's format."""

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

_FIRST = 0x10F000  # a private plane: the characters that stand for control tokens
_NUM_LAST = 8  # tokens of the prompt that may begin the reasoning


class AnswerParsing(NamedTuple):
    """How the answer of one request is read. `new_parser` None: as plain text."""

    detokenizer: Detokenizer
    new_parser: Callable[[], AnswerParser] | None = None
    ends_with_call: bool = False  # the first one
    streams_arguments: bool = False  # of calls
    constraint: Constraint | None = None  # that the answer keeps to, reasoning and calls included
    spellings: Mapping[str, str] = NO_SPELLINGS  # of characters that stand for control tokens, their text
    keeps_space: bool = False  # before its first word: it goes on with a text of the prompt, or a grammar has it


class AnswerReader:
    """Choose how an answer is read. Belongs to the event loop."""

    def __init__(self, tokenizer: Tokenizer, plain: Detokenizer, answer_format: AnswerFormat | None):
        """`answer_format`: of the chat template; None: its answers are plain text."""
        self._plain, self._format = plain, answer_format
        ids = {token["content"]: token_id for token_id, token in tokenizer.added.items()}
        self._control_ids = {
            marker: ids[marker] for marker in (answer_format.markers if answer_format else ()) if marker in ids
        }
        self._spellings = {chr(_FIRST + index): marker for index, marker in enumerate(self._control_ids)}
        characters = dict(zip(self._control_ids.values(), self._spellings, strict=True))
        self._detokenizer = Detokenizer(tokenizer, characters)

    def parsing_of(
        self,
        conversation: Conversation | None,
        prompt_ids: Sequence[int],
        constraint: Constraint | None = None,
        kept: Collection[str] | None = None,
    ) -> AnswerParsing:
        """Return how an answer to this prompt is read. What continues a text has no format. Calls of tools that are not
        strict keep to their schemas as far as they can; `kept`: only those of these, None: all. Raises InvalidRequest
        for what the model's format cannot do."""
        answer_format = self._format
        if conversation is None:
            keeps_space = constraint is not None or self._plain.has_text(prompt_ids)
            return AnswerParsing(self._plain, constraint=constraint, keeps_space=keeps_space)
        options = conversation.options
        keeps_space = constraint is not None or options.continues
        _check_format(answer_format, options)
        if answer_format is None:
            return AnswerParsing(self._plain, constraint=constraint, keeps_space=keeps_space)
        tools = {tool["name"]: tool["parameters"] for tool in options.tools if tool["name"] in options.callable_tools}
        prompt_end = b"".join(self._plain.shown(id_)[1] for id_ in prompt_ids[-_NUM_LAST:]).decode(errors="replace")
        if options.must_call and constraint is not None:
            raise InvalidRequest("constraint", "is of an answer that has to be calls")
        # What continues a text keeps to its constraint alone, and in harmony has no calls.
        if not options.continues or (constraint is None and not answer_format.is_harmony):
            bound = set(options.strict_tools)
            if options.must_call or constraint is not None:
                bound |= tools.keys() if kept is None else tools.keys() & kept
            schemas = {
                name: each if name in bound else None for name, each in tools.items() if answer_format.can_call(name)
            }
            _check_tools(options, [name for name, each in schemas.items() if each is not None])
            loose = bound.difference(options.strict_tools)
            schemas |= {name: _loosened(name, tools[name]) for name in loose & schemas.keys()}
            asked = GrammarAsked(schemas, options.must_call, options.is_parallel, constraint, loose)
            grammar = answer_grammar(answer_format, self._control_ids, prompt_end, asked)
            constraint = Constraint("grammar", grammar) if grammar else constraint
        ends_with_call = bool(tools) and not options.is_parallel
        new_parser = partial(answer_format.parser, self._spellings, tools, prompt_end, options.continues)
        streams = options.streams_arguments
        return AnswerParsing(
            self._detokenizer, new_parser, ends_with_call, streams, constraint, self._spellings, keeps_space
        )

    def can_call(self, name: str) -> bool:
        """Return whether an answer can have calls of a tool of this name."""
        return self._format is not None and self._format.can_call(name)

    def grammar_of_tool(self, conversation: Conversation, name: str) -> Constraint:
        """Return the grammar of a call of one tool, which can be called and whose schema is kept to as far as it can
        be. Raises InvalidRequest."""
        assert self._format is not None and self._format.can_call(name)
        parameters = next(tool["parameters"] for tool in conversation.options.tools if tool["name"] == name)
        asked = GrammarAsked({name: _loosened(name, parameters)}, True, False, None, (name,))
        return Constraint("grammar", answer_grammar(self._format, self._control_ids, "", asked) or "")


def _check_format(answer_format: AnswerFormat | None, options: ChatOptions) -> None:
    """Check that there can be the calls that are asked for. Raises InvalidRequest."""
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
    """Check what the grammar will have of those whose calls it binds. Raises InvalidRequest."""
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
    """Return how large the schemas of these tools are together."""
    return sum(len(json.dumps(tool["parameters"])) for tool in options.tools if tool["name"] in names)


def _loosened(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what can be kept to of a tool's schema. Raises InvalidRequest where nothing satisfies it."""
    try:
        return loosened(of_object(parameters))
    except BadConstraint as error:
        raise InvalidRequest("messages.tools", f"{name}: {error}") from None
