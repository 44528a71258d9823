"""The known formats of answers, and the choice among them by chat template."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from gateway.parsers.answer_parser import AnswerParser, TaggedParser
from gateway.parsers.calls import CallReader
from gateway.parsers.grammars import (
    CallsWriter,
    dsml_calls,
    harmony_calls,
    named_calls,
    object_calls,
    section,
    tagged_calls,
)
from gateway.parsers.harmony import MARKERS, HarmonyParser
from gateway.parsers.json_calls import DeepSeekReader, HermesReader, LlamaJsonReader, MistralReader
from gateway.parsers.pythonic import PythonicReader, pythonic_calls
from gateway.parsers.tagged_calls import DsmlReader, QwenXmlReader

_THINK = (("<think>", "</think>"),)


class AnswerFormat(NamedTuple):
    """How models of a family mark reasoning and calls."""

    name: str
    signs: tuple[str, ...]  # texts that are all in a chat template of this format
    reader: type[CallReader] | None  # None: the format has no calls, or is harmony
    thinks: tuple[tuple[str, str], ...] = _THINK  # pairs of tags around reasoning
    calls: CallsWriter | None = None  # writes the grammar of calls; None: the format has none

    @property
    def is_harmony(self) -> bool:
        """Return whether answers are messages with channels, as of gpt-oss."""
        return self.name == "harmony"

    @property
    def openers(self) -> tuple[str, ...]:
        """Return the texts that begin calls."""
        return self.reader.openers if self.reader else ()

    @property
    def first(self) -> str:
        """Return the character that begins calls without a marker; "" if they need one."""
        return self.reader.first if self.reader else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that are control tokens if the tokenizer has them."""
        if self.is_harmony:
            return MARKERS
        return (*chain(*self.thinks), *(self.reader.markers if self.reader else ()))

    def can_call(self, name: str) -> bool:
        """Return whether a call in this format can name such a tool."""
        return self.calls is not None and (self.reader is None or self.reader.can_name(name))

    def thinking(self, prompt_end: str) -> str:
        """Return the tag at the end of a prompt that opens the reasoning; "" if there is none."""
        begun = prompt_end.rstrip()
        return next((begin for begin, _ in self.thinks if begun.endswith(begin)), "")

    def parser(
        self, spellings: Mapping[str, str], tools: Mapping[str, Any], prompt_end: str, continues: bool = False
    ) -> AnswerParser:
        """Return a parser for one answer. `spellings`: from characters that stand for control tokens to their text;
        `tools`: schemas of parameters by name, none if the answer may have no calls; `prompt_end`: the last characters
        of the prompt, which may open the reasoning; `continues`: the prompt ends within the content of a message, which
        the answer continues."""
        if self.is_harmony:
            return HarmonyParser(spellings, bool(tools), continues)
        thinking = self.thinking(prompt_end)
        return TaggedParser(spellings, self.thinks, self.reader if tools else None, tools, thinking)


_MISTRAL = (("[THINK]", "[/THINK]"), *_THINK)
_LIST = section("[TOOL_CALLS] [", object_calls("", "arguments", "", ", "), "]")
_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_HERMES = object_calls("<tool_call>\n", "arguments", "\n</tool_call>", "\n")
_FENCED = named_calls("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")
_BARE = named_calls("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
# The first that matches is taken, so a more specific format comes earlier.
FORMATS = (
    AnswerFormat("harmony", ("<|channel|>", "<|message|>"), None, (), harmony_calls),
    AnswerFormat(
        "mistral", ("[TOOL_CALLS]", "[ARGS]"), MistralReader, _MISTRAL, named_calls("[TOOL_CALLS]", "[ARGS]", "")
    ),
    AnswerFormat("mistral-v3", ("[TOOL_CALLS]",), MistralReader, _MISTRAL, _LIST),
    AnswerFormat("deepseek-dsml", ("｜DSML｜",), DsmlReader, calls=dsml_calls),
    AnswerFormat("deepseek-v3", (_SECTION, "```json"), DeepSeekReader, calls=section(_SECTION, _FENCED, _SECTION_END)),
    AnswerFormat("deepseek-v31", (_SECTION,), DeepSeekReader, calls=section(_SECTION, _BARE, _SECTION_END)),
    AnswerFormat("qwen-xml", ("<tool_call>", "<function="), QwenXmlReader, calls=tagged_calls),
    AnswerFormat("hermes", ("<tool_call>", '"arguments"'), HermesReader, calls=_HERMES),
    AnswerFormat(
        "llama-json", ('"parameters"', "ipython"), LlamaJsonReader, calls=object_calls("", "parameters", "", "; ")
    ),
    AnswerFormat("pythonic", ("<|python_start|>",), PythonicReader, calls=pythonic_calls),
    AnswerFormat("think", ("<think>",), None),
)
NAMES = tuple(each.name for each in FORMATS)


def format_of(template: str) -> AnswerFormat | None:
    """Return the format of a chat template; None if its answers are plain text."""
    written = template.replace('\\"', '"')  # quotation marks in a string of the template
    return next((each for each in FORMATS if all(sign in written for sign in each.signs)), None)


def format_named(name: str) -> AnswerFormat | None:
    """Return the format of this name; None for "none"."""
    return next((each for each in FORMATS if each.name == name), None)
