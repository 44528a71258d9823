"""Read and write calls as a list of Python calls: of Llama 3.2 and 4. A grammar allows only values in JSON, which are
Python except for true, false, null and some escapes."""

import ast
import keyword
import re
import unicodedata
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

from baton.constraints.constraint import quoted
from gateway.parsers.calls import CallReader, ParsedCall
from gateway.parsers.grammars import (
    ArgumentPart,
    ArgumentsForm,
    ArgumentsSchema,
    GrammarWriter,
    Tools,
    arguments_of,
    either,
    json_value,
    repeated,
)
from gateway.parsers.reading import Cut, IncrementalText, Malformed, Reading, parse_json

_NOTABLE = re.compile(r"""[\[\](){}'"\\]""")
_HEAD = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_HEAD_BEGUN = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*)?")
_LINE_END = re.compile(rb"\r\n?|\n")
_MAX_HEAD = 1024  # characters up to the first parenthesis, which are read again for each token until it comes


class PythonicReader(CallReader):
    """Read [name(key=value, ...), ...], alone or after <|python_start|>. Alone it may also be an answer in Python, so
    its names must be those of tools."""

    openers = ("<|python_start|>",)
    first = "["
    markers = ("<|python_start|>", "<|python_end|>")

    @staticmethod
    def can_name(name: str) -> bool:
        return all(map(_is_identifier, name.split(".")))

    def read(self, source: IncrementalText, opener: str) -> Reading:
        yield from source.peek()
        calls = _calls((yield from _list(source)))
        if not opener and any(call.name not in self.tools for call in calls):
            raise Malformed
        self.emit(*calls)
        source.good = source.at
        yield from source.accept(self.spelled["<|python_end|>"])


def _list(source: IncrementalText) -> Generator[None, None, str]:
    """Return the text of a list that begins with a call. Raises Malformed, Cut."""
    begin = position = source.at
    end = begin + _MAX_HEAD
    while not _HEAD.match(source.text, begin, end):
        if len(source.text) >= end or not _HEAD_BEGUN.fullmatch(source.text, begin):
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
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            found = ast.parse(text, mode="eval").body
        segment = _segments(text)
        return [_call(each, segment) for each in found.elts]  # pyright: ignore[reportAttributeAccessIssue]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        raise Malformed from None


def _segments(text: str) -> Callable[[ast.expr], str]:
    """Return a function that finds the text of an expression; ast.get_source_segment would read all lines each time."""
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
    """Return a value, read as JSON or else as a literal of Python."""
    try:
        return parse_json(text)
    except Malformed:
        return ast.literal_eval(node)


def _is_identifier(text: str) -> bool:
    """Return whether Python reads this as a name, and does not normalize it to another."""
    return text.isidentifier() and not keyword.iskeyword(text) and unicodedata.normalize("NFKC", text) == text


def pythonic_calls(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
    """Return an expression for calls of Llama 4: one list of calls with values in JSON, and arguments in the order of
    the schema. The names of tools must be such that PythonicReader can read them."""
    writer.terminal(_KEY, rf"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~/{'|'.join(keyword.kwlist)}/")
    calls = (f'{quoted(f"{name}(")} {arguments_of(writer, name, tool, _PYTHONIC)} ")"' for name, tool in tools.items())
    return f'"[" {repeated(writer.rule(either(calls)), _COMMA, is_parallel)} "]"'


_KEY, _COMMA = "KEY", quoted(", ")


def _argument(writer: GrammarWriter, key: str, schema: Any, tool: ArgumentsSchema) -> str:
    if not _is_identifier(key):
        raise ValueError("has a name that no keyword of a Python call has")
    if schema is False:
        raise ValueError("has a schema that nothing keeps to")
    return f"{quoted(f'{key}=')} {json_value(writer, schema, tool)}"


def _any_arguments(writer: GrammarWriter) -> str:
    argument = writer.rule(f'{_KEY} "=" {writer.json({})}')
    return f"({repeated(argument, _COMMA, True)})?"


def _separated(writer: GrammarWriter, parts: Sequence[ArgumentPart]) -> str:
    if not parts:
        return ""
    first, _ = _halved(writer, parts)
    return first if any(part.is_required for part in parts) else f"({first})?"


def _halved(writer: GrammarWriter, parts: Sequence[ArgumentPart]) -> tuple[str, str]:
    """Return two expressions for these arguments, with commas and all required ones: the first for one or more of them
    if no argument comes before, the second for any number of them after others. Each argument is written once,
    whichever are left out before it. The rules split the arguments by halves: with a chain of rules the masks of a call
    with 500 arguments took four times as long."""
    if len(parts) == 1:
        argument = writer.rule(parts[0].expression)
        behind = f"{_COMMA} {argument}"
        return argument, behind if parts[0].is_required else f"({behind})?"
    left, right = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    (first, first_behind), (second, second_behind) = _halved(writer, left), _halved(writer, right)
    rest = writer.rule(second_behind)
    begun = f"{first} {rest}"
    return begun if any(part.is_required for part in left) else f"({begun} | {second})", f"{first_behind} {rest}"


_PYTHONIC = ArgumentsForm(_argument, _any_arguments, _separated)
