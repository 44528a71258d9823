"""Read calls with a tag around each argument: of Qwen3-Coder and Qwen3.5, and of DeepSeek V3.2 and V4."""

import re
from collections.abc import Generator
from typing import Any

from gateway.parsers.calls import CallReader, ParsedCall
from gateway.parsers.reading import IncrementalText, Malformed, Reading, parse_json
from gateway.parsers.schema_types import property_of, types_of

_WORDS = {"True": True, "False": False, "None": None}


class QwenXmlReader(CallReader):
    """Read <tool_call><function=name><parameter=key>value</parameter></function></tool_call>"""

    openers = ("<tool_call>", "<function=")
    ends_thinking = True  # Qwen3.5 begins a call without closing its reasoning
    markers = ("<tool_call>", "</tool_call>")

    def read(self, source: IncrementalText, opener: str) -> Reading:
        if opener != "<function=":
            yield from source.expect("<function=")
        name = yield from source.name()
        yield from source.expect(">")
        if opener == "<function=" and name not in self.tools:
            raise Malformed  # prose and code may have this text too
        arguments: dict[str, Any] = {}
        while (yield from source.expect("<parameter=", "</function>")) == "<parameter=":
            key, _ = yield from source.until(">")
            arguments[key] = self._value(name, key, (yield from self._text(source)))
        self.emit(ParsedCall(name, arguments))
        source.good = source.at
        yield from source.accept(self.spelled["</tool_call>"])

    def _text(self, source: IncrementalText) -> Generator[None, None, str]:
        """Return an argument's text. An end tag without a tag after it is part of the text; models also leave out the
        end tag."""
        begin = source.at
        while True:
            _, tag = yield from source.until("</parameter>", "\n<parameter=", "\n</function>")
            end = source.at - len(tag)
            if tag == "</parameter>":
                following = yield from source.accept("<parameter=", "</function>")
                source.at -= len(following)
            elif tag == "\n<parameter=":
                following, source.at = tag, end
            else:
                following = yield from source.accept(self.spelled["</tool_call>"])
                source.at = end if following else source.at
            if following:
                return source.text[begin:end].removeprefix("\n").removesuffix("\n")

    def _value(self, name: str, key: str, text: str) -> Any:
        """Return the value in the type that the tool's schema names; without a type it is text."""
        root = self.tools.get(name) or {}
        types = types_of(property_of(root, key), root)
        if not types or ("string" in types and (text != "null" or "null" not in types)):
            return text
        if text in _WORDS:
            return _WORDS[text]
        try:
            return parse_json(text)
        except Malformed:
            return text


class DsmlReader(CallReader):
    """Read calls of the form
    <｜DSML｜invoke name="F"><｜DSML｜parameter name="P" string="true">...</｜DSML｜parameter></｜DSML｜invoke>"""

    openers = tuple(f"<｜DSML｜{name}>" for name in ("function_calls", "tool_calls", " calls", "calls"))
    markers = ("｜DSML｜",)
    _head = re.compile(r' name="([^"]*)"(?: string="(true|false)")?\s*(/?)')

    def read(self, source: IncrementalText, opener: str) -> Reading:
        mark = self.spelled["｜DSML｜"]
        gap = " " if opener.partition(mark)[2].startswith(" ") else ""
        open_tag, close_tag = f"<{mark}{gap}", f"</{mark}{gap}"
        while (yield from source.expect(f"{open_tag}invoke", close_tag)) != close_tag:
            name, _, is_empty = yield from self._attributes(source)
            arguments: dict[str, Any] = {}
            while not is_empty and (yield from source.expect(f"{open_tag}parameter", f"{close_tag}invoke>"))[1] != "/":
                key, is_text, _ = yield from self._attributes(source)
                value, _ = yield from source.until(f"{close_tag}parameter>")
                arguments[key] = value if is_text == "true" else parse_json(value)
            self.emit(ParsedCall(name, arguments))
            source.good = source.at
            if not (yield from source.peek()):
                return
        yield from source.until(">")

    def _attributes(self, source: IncrementalText) -> Generator[None, None, tuple[str, str, str]]:
        head, _ = yield from source.until(">")
        found = self._head.fullmatch(head)
        if not found:
            raise Malformed
        return found[1], found[2] or "", found[3]
