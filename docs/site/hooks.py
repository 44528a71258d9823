"""Hooks of mkdocs: the reference is generated from the code, and files beside docs/ that pages link to are pages too.

Pages are written for the repository. README is the site's first page; another file outside docs/ becomes a page that
shows it; a link to a folder becomes its name."""

import argparse
import os
import re
from importlib import import_module
from pathlib import Path, PurePosixPath

import proto_pages
from mkdocs.structure.files import File, Files

from baton.cli.cluster.up_settings import UpSettings
from baton.cli.main import COMMANDS
from baton.service.settings import flat_fields, make_parser, variable
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings

ROOT = Path(__file__).resolve().parents[2]
_CONTRACT = ROOT / "protos" / "baton" / "v1"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".proto": "proto", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".js": "javascript"}


def on_files(files: Files, config) -> Files:
    """Add the generated pages, and those of all files that a page links to."""
    added = {"reference/commands.md": commands(), "reference/settings.md": settings(), "reference/calls.md": calls()}
    texts = proto_pages.read(_CONTRACT)
    known = proto_pages.blocks(texts)
    for text in texts:
        added |= {method.uri: proto_pages.page(method, known) for method in proto_pages.methods(text)}
    waiting = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    seen = set()
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        if not page.is_relative_to(ROOT / "docs"):
            added[_uri(page)] = _shown(page)
        if page.suffix == ".md":
            targets = ((page.parent / target).resolve() for _, target, _ in _LINK.findall(page.read_text()))
            waiting += [each for each in targets if each.is_file() and not each.is_relative_to(ROOT / "docs")]
    for uri, content in added.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Lead links to where the files are in the site."""
    source = _source(page.file.src_uri)
    if source is None:
        return markdown

    def lead(match: re.Match) -> str:
        label, target, anchor = match[1], (source.parent / match[2]).resolve(), match[3] or ""
        if target.is_dir():
            return label
        return f"[{label}]({os.path.relpath(_uri(target), PurePosixPath(page.file.src_uri).parent)}{anchor})"

    return _LINK.sub(lead, markdown)


def _uri(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    inside = path.relative_to(ROOT).as_posix()
    return f"source/{inside}" if path.suffix == ".md" else f"source/{inside}.md"


def _source(uri: str) -> Path | None:
    """Return the file of the repository that a page shows; None for generated pages."""
    if uri == "index.md":
        return ROOT / "README.md"
    if uri.startswith("source/"):
        path = ROOT / uri.removeprefix("source/")
        return path if path.is_file() else None
    path = ROOT / "docs" / uri
    return path if path.is_file() else None


def _shown(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    return f"# {path.relative_to(ROOT)}\n\n````{_LANGUAGES.get(path.suffix, '')}\n{path.read_text()}\n````\n"


def commands() -> str:
    """Return the page of all commands: what each says of itself."""
    parser = make_parser("baton", "")
    subparsers = parser.add_subparsers()
    for module in COMMANDS.values():
        import_module(f"baton.cli.{module}").add_parser(subparsers)
    parts = ["# Commands\n\nWhat `--help` of each says. Exit codes: 0 done, 1 failed, 2 wrong use.\n"]
    for name, subparser in subparsers.choices.items():
        subparser.formatter_class = _wide(subparser.formatter_class)
        parts.append(f"## baton {name}\n\n```\n{subparser.format_help()}```\n")
    return "\n".join(parts)


def _wide(base: type[argparse.HelpFormatter]) -> type[argparse.HelpFormatter]:
    """Return the same formatter of help, as wide on every terminal."""

    class Wide(base):
        def __init__(self, prog: str, **options):
            super().__init__(prog, width=110, **options)

    return Wide


def settings() -> str:
    """Return the page of all settings: flag, variable, default and meaning."""
    parts = [
        "# Settings\n\nEach is a flag, a variable and a key of a TOML file: "
        "[how they go together](../operations.md#settings-flags-variables-a-file).\n"
    ]
    for title, cls in (("baton up", UpSettings), ("gateway", GatewaySettings), ("worker", WorkerSettings)):
        rows = [
            f"| `--{name.replace('_', '-')}` | `{variable(name)}` | {_default(field.default)} | "
            f"{_cell(field.metadata.get('help', ''))} |"
            for name, (field, _) in flat_fields(cls).items()
        ]
        parts += [f"## {title}\n", "| flag | variable | default | what it does |", "|---|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _default(value: object) -> str:
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return (
        ""
        if value is None or not isinstance(value, str | int | float | tuple | Path)
        else f"`{_cell(shown)}`" * bool(shown)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def calls() -> str:
    """Return the page of all calls: each service with its methods, what goes in and comes out, and the messages."""
    parts = ["# Calls\n\nGenerated from the .proto files, whose comments say what each field means.\n"]
    parts += ["| call | in | out | |", "|---|---|---|---|"]
    for text in proto_pages.read(_CONTRACT):
        for method in proto_pages.methods(text):
            name = f"{method.service}.{method.name}"
            parts.append(f"| [{name}](calls/{name}.md) | {method.taken} | {method.given} | {_cell(method.about)} |")
    for path in sorted(_CONTRACT.glob("*.proto")):
        parts.append(f"\n## {path.name}\n\n```proto\n{path.read_text()}```\n")
    return "\n".join(parts)
