"""A page for each call of the contract, from the comments of the .proto files: what it does, and every field of the
messages that go in and come out."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_SERVICE = re.compile(r"^service (\w+) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_METHOD = re.compile(r"((?:^ *//.*\n)*)^ *rpc (\w+)\((.*?)\) returns \((.*?)\);", re.MULTILINE)
_BLOCK = re.compile(r"((?:^//[^\n]*\n)*)^(?:message|enum) (\w+) \{(?:\n(.*?)^)?\}", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(
    r"(?P<type>(?:optional |repeated )?[\w.]+(?:<.*?>)? )?(?P<name>\w+) = (?P<number>\d+)(?: \[deprecated = true\])?;"
)


class Method(NamedTuple):
    """A call. `taken` and `given`: its messages, with `stream` before them where there are many."""

    service: str
    name: str
    about: str
    taken: str
    given: str

    @property
    def uri(self) -> str:
        return f"reference/calls/{self.service}.{self.name}.md"


class Member(NamedTuple):
    """A field of a message, or a value of an enum, whose type is empty."""

    name: str
    number: int
    type: str
    about: str


class Block(NamedTuple):
    """A message or an enum."""

    about: str
    members: list[Member]


def methods(text: str) -> Iterator[Method]:
    """Yield the calls of a .proto file."""
    for service, body in _SERVICE.findall(text):
        for told, name, taken, given in _METHOD.findall(body):
            yield Method(service, name, _words(told.splitlines()), taken, given)


def blocks(texts: Iterable[str]) -> dict[str, Block]:
    """Return the messages and enums of all files by name."""
    return {
        name: Block(_words(told.splitlines()), list(_members(body)))
        for text in texts
        for told, name, body in _BLOCK.findall(text)
    }


def page(method: Method, known: Mapping[str, Block]) -> str:
    """Return the page of a call."""
    parts = [f"# {method.service}.{method.name}\n", f"{method.about}\n"]
    parts.append(f"Takes {_told(method.taken)}, returns {_told(method.given)}.\n")
    for name in _reached((method.taken, method.given), known):
        block = known[name]
        parts += [f"## {name}\n", *([f"{block.about}\n"] if block.about else [])]
        if block.members:
            parts += ["| field | number | type | what it means |", "|---|---|---|---|"]
            parts += [
                f"| `{each.name}` | {each.number} | {_cell(each.type)} | {_cell(each.about)} |"
                for each in block.members
            ]
        parts.append("")
    return "\n".join(parts)


def _members(body: str) -> Iterator[Member]:
    told: list[str] = []
    one_of = ""
    for line in body.splitlines():
        if line.strip().startswith("//"):
            told.append(line)
        elif opened := re.search(r"oneof (\w+) \{", line):
            one_of, told = opened[1], []
        elif found := _FIELD.search(line):
            behind = line.partition("//")[2]
            about = " ".join(part for part in (_words(told), behind.strip()) if part)
            if one_of:
                about = f"one of {one_of}{': ' * bool(about)}{about}"
            yield Member(found["name"], int(found["number"]), (found["type"] or "").strip(), about)
            told = []
        elif line.strip() == "}":
            one_of = ""


def _reached(types: Iterable[str], known: Mapping[str, Block]) -> list[str]:
    """Return the blocks that the types name, and those that they name in turn, each once."""
    found: list[str] = []
    waiting = list(types)
    while waiting:
        for name in re.findall(r"\w+", waiting.pop(0)):
            if name in known and name not in found:
                found.append(name)
                waiting += [member.type for member in known[name].members]
    return found


def _told(type_: str) -> str:
    is_stream, _, name = type_.rpartition(" ")
    return f"a stream of `{name}`" if is_stream else f"`{name}`"


def _words(lines: Iterable[str]) -> str:
    return " ".join(line.strip().removeprefix("//").strip() for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def read(folder: Path) -> list[str]:
    """Return the texts of all .proto files."""
    return [path.read_text() for path in sorted(folder.glob("*.proto"))]
