"""One grammar of all that an answer may be: its reasoning, and then calls of tools, an answer that keeps to a constraint, or
either. So nothing has to be switched on within an answer, where speculation may be ahead."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from baton.constraints.constraint import MAX_BYTES
from baton.constraints.json_schema import rewrite_schema
from baton.service.errors import InvalidRequest
from gateway.parsers.schema_types import types_of

# Between two words of JSON, as constraints have it.
_GUIDANCE = {
    "x-guidance": {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
}
_ANY_TEXT = "/(?s:.*)/"
_BLANKS = r"/[ \n]{0,4}/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class GrammarWriter:
    """Write rules in the words of llguidance. Raises InvalidRequest where they become longer than a constraint may be: a
    schema may stand in them once for each argument."""

    def __init__(self, control_ids: Mapping[str, int]):
        """`control_ids`: markers that are tokens."""
        self._control_ids = control_ids
        self._split = re.compile("|".join(map(re.escape, sorted(control_ids, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []
        self._num_written = 0  # characters, in about

    def text(self, text: str) -> str:
        """Return an expression for just this text; markers in it are tokens where the tokenizer has them."""
        parts, at = list[str](), 0
        for found in self._split.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._control_ids[found[0]]}]>"]
            at = found.end()
        parts.append(_quoted(text[at:]))
        return self._counted(" ".join(part for part in parts if part != '""'))

    def until(self, end: str) -> str:
        """Return an expression for any text, and this one that ends it."""
        if end in self._control_ids:
            return f"{_ANY_TEXT} {self.text(end)}"
        self._rules.append(self._counted(f"until{len(self._rules)}[suffix={_quoted(end)}]: {_ANY_TEXT}"))
        return f"until{len(self._rules) - 1}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a value of JSON."""
        self._counted(json.dumps(schema))  # before it is walked, which takes longer
        return f"%json {json.dumps({**rewrite_schema(schema), **_GUIDANCE})}"

    def grammar(self, start: str) -> str:
        """Return the grammar."""
        return "\n".join((f"start: {start}", *self._rules))

    def _counted(self, expression: str) -> str:
        self._num_written += len(expression)
        if self._num_written > MAX_BYTES:
            raise InvalidRequest("messages.tools", f"need a grammar of more than {MAX_BYTES} bytes, which is the most")
        return expression


def either(expressions: Iterable[str]) -> str:
    """Return an expression for one of these."""
    return f"({' | '.join(expressions)})"


Tools = Mapping[str, Mapping[str, Any]]
CallsWriter = Callable[[GrammarWriter, Tools, bool], str]
"""Returns an expression for calls of tools, given their schemas by name: one or, if the last is true, several."""


def repeated(expression: str, separator: str, is_parallel: bool) -> str:
    """Return an expression for one or several of these."""
    return f"{expression} ({separator} {expression})*" if is_parallel else expression


def object_calls(begin: str, key: str, end: str, separator: str) -> CallsWriter:
    """Return a writer of calls that are an object of JSON with name and arguments, between two texts."""

    def write(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
        calls = []
        for name, schema in tools.items():
            head = f'{{"name": {json.dumps(name)}, {json.dumps(key)}: '
            calls.append(f"{_quoted(head)} {writer.json(schema)}")
        call = " ".join(filter(None, (writer.text(begin), either(calls), writer.text("}" + end))))
        return repeated(call, writer.text(separator), is_parallel)

    return write


def named_calls(begin: str, behind_name: str, end: str) -> CallsWriter:
    """Return a writer of calls that are a name and the arguments, between three texts."""

    def write(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
        calls = either(
            f"{_quoted(name)} {writer.text(behind_name)} {writer.json(schema)}" for name, schema in tools.items()
        )
        call = f"{writer.text(begin)} {calls} {writer.text(end)}"
        return f"({call})+" if is_parallel else call

    return write


def section(begin: str, calls: CallsWriter, end: str) -> CallsWriter:
    """Return a writer of calls with a text before all of them, and one behind."""

    def write(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
        return f"{writer.text(begin)} {calls(writer, tools, is_parallel)} {writer.text(end)}"

    return write


def tagged_calls(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
    """Write calls of Qwen3-Coder: a tag around each argument, in the order of the schema."""
    calls = []
    for name, schema in tools.items():
        parts = [writer.text(f"<function={name}>\n")]
        properties, required = schema.get("properties"), schema.get("required")
        for key, each in (properties if isinstance(properties, dict) else {}).items():
            is_needed = isinstance(required, list) and key in required
            part = f"{writer.text(_PARAMETER.format(key))} {_tagged_value(writer, each, schema)}"
            parts.append(part if is_needed else f"({part})?")
        calls.append(" ".join(parts))
    call = f"{writer.text(_OPEN)} {either(calls)} {writer.text(_CLOSE)}"
    return repeated(call, writer.text("\n"), is_parallel)


_OPEN, _CLOSE, _PARAMETER, _PARAMETER_END = (
    "<tool_call>\n", "</function>\n</tool_call>", "<parameter={}>\n", "\n</parameter>\n",
)  # fmt: skip


def _tagged_value(writer: GrammarWriter, schema: Any, root: Mapping[str, Any]) -> str:
    """Return an expression for an argument and its end: text as it is, JSON for all else."""
    types = types_of(schema, root)
    if isinstance(schema, dict) and types == {"string"} and "enum" in schema:
        return f"{either(map(_quoted, schema['enum']))} {writer.text(_PARAMETER_END)}"
    if not types or "string" in types:
        return writer.until(_PARAMETER_END)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{writer.json({**schema, **shared})} {writer.text(_PARAMETER_END)}"


def harmony_calls(writer: GrammarWriter, tools: Tools, is_parallel: bool) -> str:
    """Write a call of gpt-oss, which ends its turn with the first."""
    calls = []
    for name, schema in tools.items():
        head = f" to=functions.{name} <|constrain|>json<|message|>"
        calls.append(f"{writer.text(head)} {writer.json(schema)}")
    return f"{writer.text('<|channel|>commentary')} {either(calls)}"


# As Lark has a regex: on one line, between slashes.
_IN_REGEX = re.compile(r"\\(.)|/|\n", re.DOTALL)


def _escaped(found: re.Match[str]) -> str:
    character = found[1] or found[0]
    return {"/": r"\x2F", "\n": r"\n"}.get(character, found[0])


def constrained(writer: GrammarWriter, kind: str, text: str) -> str:
    """Return an expression for an answer that keeps to a constraint, of any kind but a grammar."""
    if kind == "regex":
        return f"/{_IN_REGEX.sub(_escaped, text)}/"
    if kind == "choice":
        return either(map(_quoted, json.loads(text)))
    schema = json.loads(text) if kind == "json_schema" else {"type": "object"}
    return writer.json(schema if isinstance(schema, dict) else {})


def reasoned(writer: GrammarWriter, thinks: Iterable[tuple[str, str]], thinking: str) -> str:
    """Return an expression for reasoning between tags, which `thinking` has begun; "" where there can be none."""
    for begin, end in thinks:
        if begin == thinking:
            return f"{writer.until(end)} {_BLANKS}"
        if not thinking and writer.text(begin).startswith("<["):
            return f"({writer.text(begin)} {writer.until(end)} {_BLANKS})?"
    return ""
