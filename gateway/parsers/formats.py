"""The forms that are known, and which one a chat template belongs to."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from gateway.parsers.answer_parser import AnswerParser, TaggedParser
from gateway.parsers.calls import CallReader
from gateway.parsers.harmony import MARKERS, HarmonyParser
from gateway.parsers.json_calls import DeepSeekReader, HermesReader, LlamaJsonReader, MistralReader
from gateway.parsers.pythonic import PythonicReader
from gateway.parsers.tagged_calls import DsmlReader, QwenXmlReader

_THINK = (("<think>", "</think>"),)


class AnswerFormat(NamedTuple):
    """How models of a family mark reasoning and calls. `reader` None: no calls, or those of harmony."""

    name: str
    signs: tuple[str, ...]  # a chat template that has all of them belongs to it
    reader: type[CallReader] | None
    thinks: tuple[tuple[str, str], ...] = _THINK

    @property
    def is_harmony(self) -> bool:
        """Return whether answers are messages with channels."""
        return self.name == "harmony"

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that are control tokens where the tokenizer has such."""
        if self.is_harmony:
            return MARKERS
        return (*chain(*self.thinks), *(self.reader.markers if self.reader else ()))

    def parser(self, spellings: Mapping[str, str], tools: Mapping[str, Any], prompt_end: str) -> AnswerParser:
        """Return a parser for one answer. `spellings`: characters that stand for control tokens; `tools`: schemas of
        parameters by name, none: the answer has no calls; `prompt_end`: the last characters of the prompt, which may begin the reasoning."""
        if self.is_harmony:
            return HarmonyParser(spellings, bool(tools))
        begun = prompt_end.rstrip()
        thinking = next((begin for begin, _ in self.thinks if begun.endswith(begin)), "")
        return TaggedParser(spellings, self.thinks, self.reader if tools else None, tools, thinking)


# In order: an earlier one is more particular.
FORMATS = (
    AnswerFormat("harmony", ("<|channel|>", "<|message|>"), None),
    AnswerFormat("mistral", ("[TOOL_CALLS]",), MistralReader, (("[THINK]", "[/THINK]"), *_THINK)),
    AnswerFormat("deepseek-dsml", ("｜DSML｜",), DsmlReader),
    AnswerFormat("deepseek", ("<｜tool▁calls▁begin｜>",), DeepSeekReader),
    AnswerFormat("qwen-xml", ("<tool_call>", "<function="), QwenXmlReader),
    AnswerFormat("hermes", ("<tool_call>", '"arguments"'), HermesReader),
    AnswerFormat("pythonic", ("<|python_start|>",), PythonicReader),
    AnswerFormat("llama-json", ('"parameters"', "ipython"), LlamaJsonReader),
    AnswerFormat("think", ("<think>",), None),
)
NAMES = tuple(each.name for each in FORMATS)


def format_of(template: str) -> AnswerFormat | None:
    """Return the form of a chat template's model; None: its answers are plain text."""
    return next((each for each in FORMATS if all(sign in template for sign in each.signs)), None)


def format_named(name: str) -> AnswerFormat | None:
    """Return the form of this name, which is known; None of "none"."""
    return next((each for each in FORMATS if each.name == name), None)
