"""Calls whose arguments are JSON: of Qwen and Hermes, Llama 3, Mistral, DeepSeek V3 and R1."""

import re
from typing import Any

from gateway.parsers.calls import CallReader, ParsedCall
from gateway.parsers.reading import AnswerSource, Malformed, Reading

_NAME = re.compile(r"[\w.-]+")


def call_of(value: Any) -> ParsedCall:
    """Return the call that an object with a name and arguments is. Raises Malformed."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise Malformed
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None and value.keys() <= {"name", "type", "id", "arguments", "parameters"}:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed
    return ParsedCall(name, arguments)


class HermesReader(CallReader):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def read(self, source: AnswerSource, opener: str) -> Reading:
        value = yield from source.json()
        for each in value if isinstance(value, list) else [value]:
            self.emit(call_of(each))
        source.good = source.at
        yield from source.accept(self.spelled["</tool_call>"])


class LlamaJsonReader(CallReader):
    """{"name": ..., "parameters": {...}}, alone or behind <|python_tag|>; several with a semicolon between two."""

    openers = ("<|python_tag|>",)
    first = "{"
    markers = ("<|python_tag|>",)

    def read(self, source: AnswerSource, opener: str) -> Reading:
        while True:
            call = call_of((yield from source.json()))
            if not opener and call.name not in self.tools:
                raise Malformed
            self.emit(call)
            source.good = source.at
            yield from source.accept(";")
            following = yield from source.accept(self.spelled["<|python_tag|>"])
            if not following and (yield from source.peek()) != "{":
                return


class MistralReader(CallReader):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}], or for each call [TOOL_CALLS]name[ARGS]{...}"""

    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, source: AnswerSource, opener: str) -> Reading:
        if (yield from source.peek()) == "[":
            value = yield from source.json()
            for call in [call_of(each) for each in value]:
                self.emit(call)
        else:
            name, behind = yield from source.until(self.spelled["[ARGS]"], self.spelled["[CALL_ID]"], "{")
            if behind == "{":
                source.at -= 1
            elif behind == self.spelled["[CALL_ID]"]:
                yield from source.until(self.spelled["[ARGS]"])
            if not _NAME.fullmatch(name.strip()):
                raise Malformed
            arguments = yield from source.json()
            self.emit(ParsedCall(name.strip(), arguments))
        source.good = source.at


class DeepSeekReader(CallReader):
    """A section of calls, each a name and JSON, which V3 and R1 fence."""

    openers = ("<｜tool▁calls▁begin｜>",)
    markers = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    )  # fmt: skip

    def read(self, source: AnswerSource, opener: str) -> Reading:
        _, all_end, begin, end, separator = (self.spelled[marker] for marker in self.markers)
        while (yield from source.expect(begin, all_end)) == begin:
            name, _ = yield from source.until(separator)
            fence = ""
            if (yield from source.peek()) != "{":
                name, fence = yield from source.until("```json")
            arguments = yield from source.json()
            if fence:
                yield from source.expect("```")
            yield from source.expect(end)
            if not _NAME.fullmatch(name.strip()):
                raise Malformed
            self.emit(ParsedCall(name.strip(), arguments))
            source.good = source.at
            if not (yield from source.peek()):
                return
