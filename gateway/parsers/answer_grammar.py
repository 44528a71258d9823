"""Make the grammar of an answer from its tools, the choice among them and its constraint."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gateway.parsers.formats import AnswerFormat
from gateway.parsers.grammars import ArgumentsSchema, GrammarWriter, constrained, either, reasoned, text_or_calls

_ANALYSIS, _PREAMBLE, _END = "<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>", "<|end|>"
_FINAL = "<|channel|>final<|message|>"


class GrammarAsked(NamedTuple):
    """What a request asks of the grammar of its answer."""

    tools: Mapping[str, Mapping[str, Any] | None]  # schemas of those that can be called; None: arguments are any object
    must_call: bool  # the answer consists of calls
    is_parallel: bool  # it may have several calls
    constraint: tuple[str, str] | None  # kind and text, for an answer that is no call; None: it is any text
    loose: Collection[str] = ()  # tools whose schemas are enforced as far as possible


def of_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments with the type object, which it may leave out: anything else would be no call."""
    return {**schema, "type": "object"}


def answer_grammar(
    answer_format: AnswerFormat, control_ids: Mapping[str, int], prompt_end: str, asked: GrammarAsked
) -> str | None:
    """Return the grammar, as llguidance reads it; None if the constraint alone is enough, or nothing binds the answer.
    A constraint that is a grammar applies to the whole answer, so it is enough."""
    constraint, binds_calls = asked.constraint, any(schema is not None for schema in asked.tools.values())
    if not (asked.must_call or constraint or binds_calls) or (constraint and constraint[0] == "grammar"):
        return None
    writer, ways = GrammarWriter(control_ids), list[str]()
    if asked.tools and answer_format.calls:
        tools = {
            name: each if each is None else ArgumentsSchema(of_object(each), name not in asked.loose)
            for name, each in asked.tools.items()
        }
        ways.append(answer_format.calls(writer, tools, asked.is_parallel))
    if not asked.must_call and (constraint or answer_format.is_harmony):
        answer = constrained(writer, *constraint) if constraint else writer.any_text()
        ways.append(f"{writer.text(_FINAL)} {answer}" if answer_format.is_harmony else answer)
    elif not asked.must_call:
        ways = [text_or_calls(writer, ways[0], answer_format.openers, answer_format.first)]
    if answer_format.is_harmony:
        begins = (_ANALYSIS,) if asked.must_call or constraint else (_ANALYSIS, _PREAMBLE)
        before = (f"({writer.text(f)} {writer.until(_END)} {writer.text('<|start|>assistant')})?" for f in begins)
        return writer.grammar(f"{' '.join(before)} {either(ways)}")
    thought = reasoned(writer, answer_format.thinks, answer_format.thinking(prompt_end))
    if len(ways) == 1 and constraint and not asked.must_call and not thought:
        return None
    return writer.grammar(f"{thought} {either(ways)}")
