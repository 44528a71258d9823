"""The grammar of an answer: made of its tools, their choice and its constraint."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.parsers.formats import AnswerFormat
from gateway.parsers.grammars import GrammarWriter, constrained, either, reasoned

_ANALYSIS, _ANALYSIS_END = "<|channel|>analysis<|message|>", "<|end|>"


class GrammarAsked(NamedTuple):
    """`tools`: schemas of those that may be called; `must_call`: the answer is calls; `constraint`: kind and text of what
    the answer keeps to otherwise."""

    tools: Mapping[str, Mapping[str, Any]]
    must_call: bool
    is_parallel: bool
    constraint: tuple[str, str] | None


def answer_grammar(
    form: AnswerFormat, control_ids: Mapping[str, int], prompt_end: str, asked: GrammarAsked
) -> str | None:
    """Return the grammar, in the words of llguidance; None where nothing binds the answer but its constraint alone.
    A constraint that is a grammar is of the whole answer."""
    constraint = asked.constraint
    if not (asked.must_call or constraint) or (constraint and constraint[0] == "grammar"):
        return None
    writer, ways = GrammarWriter(control_ids), list[str]()
    if asked.tools and form.calls:
        # A schema may say nothing of the type, and arguments that are no object would be no call.
        tools = {name: {**schema, "type": "object"} for name, schema in asked.tools.items()}
        ways.append(form.calls(writer, tools, asked.is_parallel))
    if constraint and not asked.must_call:
        answer = constrained(writer, *constraint)
        ways.append(f"{writer.text('<|channel|>final<|message|>')} {answer}" if form.is_harmony else answer)
    if form.is_harmony:
        thought = f"{writer.text(_ANALYSIS)} {writer.until(_ANALYSIS_END)} {writer.text('<|start|>assistant')}"
        return writer.grammar(f"({thought})? {either(ways)}")
    thought = reasoned(writer, form.thinks, form.thinking(prompt_end))
    if len(ways) == 1 and constraint and not asked.must_call and not thought:
        return None
    return writer.grammar(f"{thought} {either(ways)}")
