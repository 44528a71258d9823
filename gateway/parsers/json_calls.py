"""Read calls whose arguments are JSON: of Qwen and Hermes, Llama 3, Mistral, DeepSeek V3 and R1. The arguments are
emitted in parts if the name comes before them."""

from collections.abc import Generator
from typing import Any

from gateway.parsers.calls import CallReader, ParsedCall
from gateway.parsers.reading import IncrementalText, Malformed, Reading, parse_json


def call_of(value: Any) -> ParsedCall:
    """Return the call that is written as an object with a name and arguments. Raises Malformed."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise Malformed
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None and value.keys() <= {"name", "type", "id", "arguments", "parameters"}:
        arguments = {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise Malformed
    return ParsedCall(name, arguments)


class ObjectReader(CallReader):
    """Read calls that are objects with a name and arguments."""

    def object(self, source: IncrementalText, must_be_known: bool = False) -> Reading:
        """Read one call. `must_be_known`: its name must be a tool's. Raises Malformed, Cut."""
        begin = source.at
        if name := (yield from _name_in_head(source)):
            self._check(name, must_be_known)
            yield from self.arguments(source, name)
            if (yield from source.expect("}", ",")) == ",":
                yield from source.rest_of_object()
            self.sink.end()
        else:
            source.at = begin
            call = call_of((yield from source.json()))
            self._check(call.name, must_be_known)
            self.emit(call)
        source.good = source.at

    def objects(self, source: IncrementalText) -> Reading:
        """Read one call, or a list of them. Raises Malformed, Cut."""
        if (yield from source.peek()) != "[":
            yield from self.object(source)
            return
        yield from source.expect("[")
        following = yield from source.accept("]")
        while following != "]":
            yield from self.object(source)
            following = yield from source.expect(",", "]")
        source.good = source.at

    def _check(self, name: str, must_be_known: bool) -> None:
        if must_be_known and name not in self.tools:
            raise Malformed


def _name_in_head(source: IncrementalText) -> Generator[None, None, str]:
    """Read up to the arguments and return the name; "" if the object does not begin with the name and then these."""
    for text in ("{", '"name"', ":", '"'):
        if not (yield from source.accept(text)):
            return ""
    name, _ = yield from source.until('"')
    for texts in ((",",), ('"arguments"', '"parameters"'), (":",)):
        if "\\" in name or not (yield from source.accept(*texts)):
            return ""
    return name if (yield from source.peek()) == "{" else ""


class HermesReader(ObjectReader):
    """Read <tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def read(self, source: IncrementalText, opener: str) -> Reading:
        yield from self.objects(source)
        yield from source.accept(self.spelled["</tool_call>"])


class LlamaJsonReader(ObjectReader):
    """Read {"name": ..., "parameters": {...}}, alone or after <|python_tag|>; semicolons separate several."""

    openers = ("<|python_tag|>",)
    first = "{"
    markers = ("<|python_tag|>",)

    def read(self, source: IncrementalText, opener: str) -> Reading:
        while True:
            yield from self.object(source, must_be_known=not opener)
            yield from source.accept(";")
            following = yield from source.accept(self.spelled["<|python_tag|>"])
            if not following and (yield from source.peek()) != "{":
                return


class MistralReader(ObjectReader):
    """Read [TOOL_CALLS][{"name": ..., "arguments": {...}}], or for each call [TOOL_CALLS]name[ARGS]{...}"""

    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, source: IncrementalText, opener: str) -> Reading:
        if (yield from source.peek()) == "[":
            yield from self.objects(source)
            return
        name = yield from source.name()
        behind = yield from source.expect(self.spelled["[ARGS]"], self.spelled["[CALL_ID]"], "{")
        if behind == "{":
            source.at -= 1
        elif behind == self.spelled["[CALL_ID]"]:
            yield from source.until(self.spelled["[ARGS]"])
        yield from self.arguments(source, name)
        self.sink.end()
        source.good = source.at


class DeepSeekReader(CallReader):
    """Read a section of calls, each of a name and JSON, which V3 and R1 put into a fenced block."""

    openers = ("<｜tool▁calls▁begin｜>",)
    markers = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    )  # fmt: skip

    def read(self, source: IncrementalText, opener: str) -> Reading:
        _, all_end, begin, end, separator = (self.spelled[marker] for marker in self.markers)
        while (yield from source.expect(begin, all_end)) == begin:
            name = yield from source.name()
            yield from source.expect(separator)
            is_fenced = (yield from source.peek()) != "{"
            if is_fenced:
                name = yield from source.name()
                yield from source.expect("```json")
            yield from self.arguments(source, name)
            if is_fenced:
                yield from source.expect("```")
            yield from source.expect(end)
            self.sink.end()
            source.good = source.at
            if not (yield from source.peek()):
                return
