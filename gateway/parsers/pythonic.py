"""Calls as a list of Python calls: of Llama 3.2 and 4."""

import ast
import re
import warnings
from collections.abc import Generator

from gateway.parsers.calls import CallReader, ParsedCall
from gateway.parsers.reading import AnswerSource, Cut, Malformed, Reading

_NOTABLE = re.compile(r"""[\[\](){}'"\\]""")
_HEAD = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_HEAD_BEGUN = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*)?")


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
            warnings.simplefilter("ignore", SyntaxWarning)  # of escapes that Python does not know
            found = ast.parse(text, mode="eval").body
        return [_call(each) for each in found.elts]  # pyright: ignore[reportAttributeAccessIssue]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        raise Malformed from None


def _call(node: ast.expr) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:  # **more
            raise ValueError
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ParsedCall(ast.unparse(node.func), arguments)
