"""Write one grammar for a whole answer: its reasoning, then calls of tools, constrained text, or either. So no grammar
has to be switched on within an answer, where speculation may be ahead."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from baton.constraints.constraint import MAX_BYTES, quoted
from baton.constraints.json_patterns import rewrite_classes
from baton.constraints.json_references import referred_to
from baton.constraints.json_schema import KEYWORDS, SAYS_NOTHING, part_alone, rewrite_schema
from baton.service.errors import InvalidRequest
from gateway.parsers.schema_types import listed, types_of
from gateway.parsers.text_schemas import TextSchemas, regex

_ANY_TEXT = "/(?s:.*)/"
_BLANKS = r"/[ \n]{0,4}/"


class ArgumentsSchema(NamedTuple):
    """A schema of the arguments of a call. `is_strict`: what cannot be enforced is an error; else it is ignored."""

    schema: Mapping[str, Any]
    is_strict: bool = True


class GrammarWriter:
    """Write rules as llguidance reads them. Methods raise InvalidRequest if the rules become longer than a constraint
    may be, as a schema may be repeated for each argument."""

    def __init__(self, control_ids: Mapping[str, int]):
        """`control_ids`: token ids of the markers that are control tokens."""
        self._control_ids = control_ids
        self._split = re.compile("|".join(map(re.escape, sorted(control_ids, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []
        self._num_written = 0  # characters, roughly

    def text(self, text: str) -> str:
        """Return an expression for exactly this text, in which markers are control tokens if the tokenizer has them."""
        parts, at = list[str](), 0
        for found in self._split.finditer(text):
            parts += [quoted(text[at : found.start()]), f"<[{self._control_ids[found[0]]}]>"]
            at = found.end()
        parts.append(quoted(text[at:]))
        return self._counted(" ".join(part for part in parts if part != '""'))

    def until(self, end: str, texts: str = _ANY_TEXT) -> str:
        """Return an expression for a text that the terminal `texts` allows, followed by the text `end`."""
        number, (head, marked) = len(self._rules), self.cut(end)
        if marked:  # the marker is a control token, which no text contains
            text = self.terminal(f"TEXT{number}", f"({texts}) {quoted(head)}" if head else texts)
            return f"{text} {self.text(marked)}"
        text = self.terminal(f"TEXT{number}", texts)
        self._rules.append(self._counted(f"until{number}[suffix={quoted(end)}]: {text}"))
        return f"until{number}"

    def terminal(self, name: str, terminal: str) -> str:
        """Define a terminal of this name; return the name."""
        self._rules.append(self._counted(f"{name}: {terminal}"))
        return name

    def rule(self, expression: str) -> str:
        """Define a rule for the expression; return its name."""
        name = f"rule{len(self._rules)}"
        self._rules.append(self._counted(f"{name}: {expression}"))
        return name

    def cut(self, text: str) -> tuple[str, str]:
        """Split a text before its first marker that is a control token; return both parts."""
        found = self._split.search(text)
        return (text, "") if found is None else (text[: found.start()], text[found.start() :])

    def any_text(self) -> str:
        """Return an expression for any text."""
        return self.terminal("ANY", _ANY_TEXT)

    def json(self, schema: Mapping[str, Any], is_strict: bool = True) -> str:
        """Return an expression for a JSON value of this schema, whose size the caller has counted. `is_strict` False:
        the library ignores what it has no grammar for."""
        return f"%json {json.dumps(rewrite_schema(schema, is_strict))}"

    def arguments(self, tool: ArgumentsSchema | None) -> str:
        """Return an expression for arguments in JSON, of any object for None."""
        if tool is None:
            return self.json({"type": "object"})
        self.count(len(json.dumps(tool.schema)))  # before the schema is walked, which takes longer
        return self.json(*tool)

    def grammar(self, start: str) -> str:
        """Return the grammar of the rules so far. `start`: the expression of the whole answer."""
        return "\n".join((f"start: {start}", *self._rules))

    def count(self, num_characters: int) -> None:
        """Count characters that are written, or work of that size. Raises InvalidRequest if they are too many."""
        self._num_written += num_characters
        if self._num_written > MAX_BYTES:
            raise InvalidRequest("messages.tools", f"need a grammar of more than {MAX_BYTES} bytes, which is the most")

    def _counted(self, expression: str) -> str:
        self.count(len(expression))
        return expression


def either(expressions: Iterable[str]) -> str:
    """Return an expression for one of these."""
    return f"({' | '.join(expressions)})"


Tools = Mapping[str, ArgumentsSchema | None]
"""The schema of arguments by the tool's name; None: they are any object."""
CallsWriter = Callable[[GrammarWriter, Tools, bool], str]
"""Returns an expression for a call of one of the tools or, if the last argument is true, for several calls."""


def repeated(expression: str, separator: str, is_parallel: bool) -> str:
    """Return an expression for one of these or, if `is_parallel`, several."""
    return f"{expression} ({separator} {expression})*" if is_parallel else expression


def text_or_calls(writer: GrammarWriter, calls: str, openers: Sequence[str], first: str) -> str:
    """Return an expression for text, calls, or text followed by calls. `openers`: texts that begin calls for the
    parser, which none of the text may contain; written calls begin with the first one. `first`: the character that
    begins calls without an opener, if they are the whole answer."""
    spelled = [opener for opener in openers if not writer.cut(opener)[1]]
    any_of = "|".join(map(re.escape, spelled))  # in one complement, as four were too many for the library
    unlike = f" & ~{regex(f'(?s:.*)(?:{any_of})(?s:.*)')}" if spelled else ""
    if first:
        text = writer.terminal("TEXT", regex(rf"\s*([^\s{re.escape(first)}](?s:.*))?") + unlike)
        return f"({calls} | {text})"
    text = writer.terminal("TEXT", _ANY_TEXT + unlike)
    if openers[0] not in spelled:
        head, _ = writer.cut(openers[0])
        if not head:
            return f"{text} ({calls})?"
        before = writer.terminal("BEFORE", f"({_ANY_TEXT}{unlike}) {quoted(head)}")
        return f"({text} | {before} {calls.removeprefix(quoted(head))})"
    begin = quoted(openers[0])[:-1]  # without its closing quotation mark
    behind = f'"{calls.removeprefix(begin)}'.removeprefix('""')
    return f"({text} | {writer.until(openers[0])} {behind})"


def object_calls(begin: str, key: str, end: str, separator: str) -> CallsWriter:
    """Return a writer of calls that are JSON objects with a name and arguments, between two texts."""

    def write(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
        calls = []
        for name, tool in tools.items():
            head = f'{{"name": {json.dumps(name)}, {json.dumps(key)}: '
            calls.append(f"{quoted(head)} {writer.arguments(tool)}")
        call = " ".join(filter(None, (writer.text(begin), either(calls), writer.text("}" + end))))
        return repeated(call, writer.text(separator), is_parallel)

    return write


def named_calls(begin: str, behind_name: str, end: str) -> CallsWriter:
    """Return a writer of calls that are a name and arguments in JSON, between three texts."""

    def write(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
        calls = either(
            f"{quoted(name)} {writer.text(behind_name)} {writer.arguments(tool)}" for name, tool in tools.items()
        )
        return repeated(f"{writer.text(begin)} {calls} {writer.text(end)}", "", is_parallel)

    return write


def section(begin: str, calls: CallsWriter, end: str) -> CallsWriter:
    """Return a writer of calls between a text before all of them and one after."""

    def write(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
        return f"{writer.text(begin)} {calls(writer, tools, is_parallel)} {writer.text(end)}"

    return write


def tagged_calls(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
    """Return an expression for calls of Qwen3-Coder: each argument in a tag, in the order of the schema."""
    calls = []
    writer.terminal(_LINES, " & ".join(map(_lines_unlike, _TAGS)))
    writer.terminal(_KEY, r"/[^>\n]{1,64}/")
    for name, tool in tools.items():
        head = writer.text(f"<function={name}>\n")
        calls.append(f"{head} {arguments_of(writer, name, tool, _QWEN)}")
    call = f"{writer.text(_OPEN)} {either(calls)} {writer.text(_CLOSE)}"
    return repeated(call, writer.text("\n"), is_parallel)


_OPEN, _CLOSE = "<tool_call>\n", "</function>\n</tool_call>"
_PARAMETER, _PARAMETER_END = "<parameter={}>\n", "\n</parameter>\n"
_LINES, _KEY = "LINES", "KEY"  # terminals: the text of an argument, and its name
_TAGS = ("<parameter=", "</parameter>", "</function>")
# The keywords at a schema's root that can be enforced for arguments that are not JSON, beside those that say nothing.
_KEPT = {"type", "properties", "required", "additionalProperties", "unevaluatedProperties", "$defs", "definitions"}


class ArgumentPart(NamedTuple):
    """The expression of one argument, with its name."""

    expression: str
    is_required: bool


def _in_a_row(writer: GrammarWriter, parts: Sequence[ArgumentPart]) -> str:
    return " ".join(part.expression if part.is_required else f"({part.expression})?" for part in parts)


class ArgumentsForm(NamedTuple):
    """How a format writes arguments that are not one JSON object."""

    argument: Callable[[GrammarWriter, str, Any, ArgumentsSchema], str]
    """Returns an expression for an argument, by its name, its schema and the tool's. Raises ValueError if the schema
    cannot be enforced."""
    any_arguments: Callable[[GrammarWriter], str]
    """Returns an expression for any arguments."""
    joined: Callable[[GrammarWriter, Sequence[ArgumentPart]], str] = _in_a_row
    """Returns an expression for several arguments in this order."""


def arguments_of(writer: GrammarWriter, name: str, tool: ArgumentsSchema | None, form: ArgumentsForm) -> str:
    """Return an expression for the arguments of a tool. Raises InvalidRequest for a strict schema that the form cannot
    enforce."""
    if tool is None:
        return form.any_arguments(writer)
    try:
        return _arguments_in_order(writer, tool, form)
    except ValueError as error:
        if tool.is_strict:
            raise InvalidRequest("messages.tools", f"{name}: {error}") from None
        return form.any_arguments(writer)


def _arguments_in_order(writer: GrammarWriter, tool: ArgumentsSchema, form: ArgumentsForm) -> str:
    """Return an expression for arguments in the order of the schema. Raises ValueError if the form cannot follow it."""
    schema = _arguments_schema(*tool)
    parts, required = list[ArgumentPart](), frozenset(listed(schema.get("required")))
    for key, each in _properties(schema).items():
        try:
            expression = form.argument(writer, key, each, tool)
        except ValueError as error:
            if tool.is_strict:
                raise ValueError(f"{key[:40]!r} {error}") from None
            expression = form.argument(writer, key, {}, tool)
        parts.append(ArgumentPart(expression, key in required))
    return form.joined(writer, parts)


def _arguments_schema(root: Mapping[str, Any], is_strict: bool) -> Mapping[str, Any]:
    """Return the schema that lists the arguments: the root, or the target of its reference. Raises ValueError if the
    root has other keywords that constrain the arguments."""
    schema = root
    if isinstance(reference := root.get("$ref"), str) and "properties" not in root:
        schema = referred_to(root, reference)
        root = {key: value for key, value in root.items() if key != "$ref"}
    for keyword in (*root, *(schema if isinstance(schema, dict) else ("$ref",))):
        is_word = is_strict or keyword in KEYWORDS
        if is_word and keyword not in _KEPT and keyword not in SAYS_NOTHING:
            raise ValueError(f"has {keyword} at its root, which the form of this model's calls cannot keep to")
    properties = _properties(schema)
    for key in listed(schema.get("required")):
        if not isinstance(key, str) or key not in properties:
            raise ValueError(f"requires {str(key)[:40]!r}, which is not in its properties")
    return schema


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _qwen_argument(writer: GrammarWriter, key: str, schema: Any, tool: ArgumentsSchema) -> str:
    """Return an expression for an argument: plain text if its schema allows a string, JSON otherwise."""
    begin, types = writer.text(_PARAMETER.format(key)), types_of(schema, tool.schema)
    if types and "string" not in types:
        return f"{begin} {json_value(writer, schema, tool)} {writer.text(_PARAMETER_END)}"
    texts = TextSchemas(tool.schema, writer.count).expression(schema)
    if texts is None:
        raise ValueError("has a schema that no text keeps to")
    return f"{begin} {writer.until(_PARAMETER_END, ' & '.join(filter(None, (texts, _LINES))))}"


def _any_qwen_arguments(writer: GrammarWriter) -> str:
    begin, behind_name = (writer.text(part) for part in _PARAMETER.split("{}"))
    return f"({begin} {_KEY} {behind_name} {writer.until(_PARAMETER_END, _LINES)})*"


def json_value(writer: GrammarWriter, schema: Any, tool: ArgumentsSchema) -> str:
    """Return an expression for the JSON value of one argument of a tool."""
    return writer.json(part_alone(schema, tool.schema, writer.count), tool.is_strict)


_QWEN = ArgumentsForm(_qwen_argument, _any_qwen_arguments)


def _lines_unlike(begin: str) -> str:
    """Return a terminal for texts in which no line after the first begins with `begin`, which the parser would take for
    a tag. As the complement of a search, together with a bound on the length, it would take seconds to follow."""
    *head, last = map(re.escape, begin)
    line = rf"(?:[^{last}\n].*)?"
    for character in reversed(head):
        line = rf"(?:[^{character}\n].*|{character}{line})?"
    return regex(rf".*(?:\n{line})*")


def dsml_calls(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
    """Return an expression for calls of DeepSeek V3.2: each argument in a tag that says whether it is text, in the
    order of the schema."""
    calls = []
    writer.terminal(_KEY, r'/[^">\n]{1,64}/')
    for name, tool in tools.items():
        head = writer.text(f'<{_MARK}invoke name="{name}">\n')
        calls.append(f"{head} {arguments_of(writer, name, tool, _DSML)}")
    begin, behind, end = map(
        writer.text, (f"<{_MARK}function_calls>\n", f"</{_MARK}invoke>\n", f"</{_MARK}function_calls>")
    )
    return f"{begin} {repeated(f'({either(calls)} {behind})', '', is_parallel)} {end}"


_MARK = "｜DSML｜"
_DSML_BEGIN, _DSML_END = f'<{_MARK}parameter name="{{}}" string="', f"</{_MARK}parameter>\n"
_DSML_TEXT, _DSML_JSON = 'true">', 'false">'


def _dsml_argument(writer: GrammarWriter, key: str, schema: Any, tool: ArgumentsSchema) -> str:
    if set(key) & set('">\n'):
        raise ValueError("has a name that no tag has")
    types, ways = types_of(schema, tool.schema), list[str]()
    if not types or "string" in types:
        texts = TextSchemas(tool.schema, writer.count, has_null=False).expression(schema)
        if texts is not None:
            ways.append(_dsml_text(writer, texts))
    if types != {"string"} and schema is not False:
        ways.append(f"{writer.text(_DSML_JSON)} {json_value(writer, schema, tool)} {writer.text(_DSML_END)}")
    if not ways:
        raise ValueError("has a schema that nothing keeps to")
    return f"{writer.text(_DSML_BEGIN.format(key))} {either(ways)}"


def _dsml_text(writer: GrammarWriter, texts: str) -> str:
    end = writer.until(_DSML_END.removesuffix("\n"), texts or _ANY_TEXT)  # where the parser ends it
    return f"{writer.text(_DSML_TEXT)} {end} {writer.text(chr(10))}"


def _any_dsml_arguments(writer: GrammarWriter) -> str:
    begin, behind_name = (writer.text(part) for part in _DSML_BEGIN.split("{}"))
    value = f"{writer.text(_DSML_JSON)} {writer.json({})} {writer.text(_DSML_END)}"
    return f"({begin} {_KEY} {behind_name} {either((_dsml_text(writer, _ANY_TEXT), value))})*"


_DSML = ArgumentsForm(_dsml_argument, _any_dsml_arguments)


def harmony_calls(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
    """Return an expression for a call of gpt-oss, which ends its turn with its first call."""
    calls = []
    for name, tool in tools.items():
        head = f" to=functions.{name} <|constrain|>json<|message|>"
        calls.append(f"{writer.text(head)} {writer.arguments(tool)}")
    return f"{writer.text('<|channel|>commentary')} {either(calls)}"


def constrained(writer: GrammarWriter, kind: str, text: str) -> str:
    """Return an expression for text that matches a constraint of any kind but a grammar."""
    if kind == "regex":
        return regex(rewrite_classes(text))
    if kind == "choice":
        return writer.terminal("CHOICE", " | ".join(map(quoted, json.loads(text))))  # one lexeme, as without calls
    writer.count(len(text))
    schema = json.loads(text) if kind == "json_schema" else {"type": "object"}
    return writer.json(schema if isinstance(schema, dict) else {})


def reasoned(writer: GrammarWriter, thinks: Iterable[tuple[str, str]], thinking: str) -> str:
    """Return an expression for reasoning between tags, "" if there can be none. `thinking`: the tag that ends the
    prompt, "" if none does."""
    for begin, end in thinks:
        if begin == thinking:
            return f"{writer.until(end)} {_BLANKS}"
        if not thinking and writer.text(begin).startswith("<["):
            return f"({writer.text(begin)} {writer.until(end)} {_BLANKS})?"
    return ""
