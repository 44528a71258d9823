"""Calls as a list of Python calls: of Llama 3.2 and 4."""

import ast
import re
import warnings
from collections.abc import Callable, Generator

from gateway.parsers.calls import CallReader, ParsedCall
from gateway.parsers.reading import AnswerSource, Cut, Malformed, Reading, parse_json

_NOTABLE = re.compile(r"""[\[\](){}'"\\]""")
_HEAD = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_HEAD_BEGUN = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*)?")
_LINE_END = re.compile(rb"\r\n?|\n")


class PythonicReader(CallReader):
    """[name(key=value, ...), ...], alone or behind <|python_start|>. Alone it is an answer in Python too, so that its calls
    must be those of tools."""

    openers = ("<|python_start|>",)
    first = "["
    markers = ("<|python_start|>", "<|python_end|>")

    def read(self, source: AnswerSource, opener: str) -> Reading:
        yield from source.peek()
        calls = _calls((yield from _list(source)))
        if not opener and any(call.name not in self.tools for call in calls):
            raise Malformed
        self.emit(*calls)
        source.good = source.at
        yield from source.accept(self.spelled["<|python_end|>"])


def _list(source: AnswerSource) -> Generator[None, None, str]:
    """Return the text of a list that begins with a call. Raises Malformed, Cut."""
    begin = position = source.at
    while not _HEAD.match(source.text, begin):
        if not _HEAD_BEGUN.fullmatch(source.text, begin):
            raise Malformed
        if source.has_ended:
            raise Cut
        yield
    depth, quote = 0, ""
    while True:
        found = _NOTABLE.search(source.text, position)
        if found is None or (found[0] == "\\" and found.end() == len(source.text)):
            position = found.start() if found else len(source.text)
            if source.has_ended:
                raise Cut
            yield
            continue
        position = found.end() + (found[0] == "\\")
        if quote:
            quote = "" if found[0] == quote else quote
        elif found[0] in "'\"":
            quote = found[0]
        elif found[0] != "\\":
            depth += 1 if found[0] in "[({" else -1
        if not depth:
            source.at = position
            return source.text[begin:position]


def _calls(text: str) -> list[ParsedCall]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            found = ast.parse(text, mode="eval").body
        segment = _segments(text)
        return [_call(each, segment) for each in found.elts]  # pyright: ignore[reportAttributeAccessIssue]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        raise Malformed from None


def _segments(text: str) -> Callable[[ast.expr], str]:
    """Return what finds the text of an expression: ast.get_source_segment looks through all lines for each."""
    source = text.encode()
    begins = [0, *(found.end() for found in _LINE_END.finditer(source))]

    def segment(node: ast.expr) -> str:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        return source[begin:end].decode()

    return segment


def _call(node: ast.expr, segment: Callable[[ast.expr], str]) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    arguments: dict[str, object] = {}
    for argument in node.keywords:
        if argument.arg is None:  # **more
            raise ValueError
        arguments[argument.arg] = _value(argument.value, segment(argument.value))
    return ParsedCall(ast.unparse(node.func), arguments)


def _value(node: ast.expr, text: str) -> object:
    """Return a value of JSON, or else of Python."""
    try:
        return parse_json(text)
    except Malformed:
        return ast.literal_eval(node)
