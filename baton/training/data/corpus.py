"""The corpus: the Python standard library of this machine without held-out modules.

Library modules are the main text. Test files (65 % of the bytes of a source build, none on Debian) are repetitive, so
they are kept apart and the trainer draws few windows from them."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = (
    "asyncio/locks.py",
    "bisect.py",
    "calendar.py",
    "cmd.py",
    "concurrent/futures/thread.py",
    "configparser.py",
    "csv.py",
    "fractions.py",
    "ftplib.py",
    "glob.py",
    "gzip.py",
    "heapq.py",
    "html/parser.py",
    "http/cookies.py",
    "json/decoder.py",
    "logging/config.py",
    "multiprocessing/pool.py",
    "pprint.py",
    "random.py",
    "sched.py",
    "selectors.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
    "timeit.py",
    "unittest/suite.py",
    "urllib/robotparser.py",
    "uuid.py",
    "wsgiref/handlers.py",
    "zipapp.py",
)
"""Modules nothing is ever trained on, neither the models nor the tokenizer."""

_TEST_FOLDERS = {"test", "tests", "idle_test"}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "ensurepip"}
_TABLES = ("encodings/", "html/entities.py", "_sysconfigdata", "config-", "pydoc_data/")
"""Generated tables: 2.2 MB of digits and quoted manual that teach no Python."""


@dataclass(frozen=True)
class Document:
    """One source file; `path` is relative to the standard library, with forward slashes."""

    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Three disjoint lists of documents, each sorted by path."""

    library: tuple[Document, ...]
    tests: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def training(self) -> tuple[Document, ...]:
        return self.library + self.tests

    def manifest(self) -> dict:
        """Return a manifest of what was read: the Python version, and files, bytes and SHA-256 of each list."""
        lists = {"library": self.library, "tests": self.tests, "held_out": self.held_out}
        return {
            "python": platform.python_version(),
            **{name: _describe(documents) for name, documents in lists.items()},
        }


def gather(stdlib: Path | None = None, max_bytes: int | None = None) -> Corpus:
    """Read the standard library.

    `stdlib` defaults to the running interpreter's; `max_bytes` bounds each of the three lists, for quick runs. Raises
    FileNotFoundError if the folder holds no library source or none of the held-out modules."""
    root = Path(stdlib or sysconfig.get_paths()["stdlib"])
    library, tests, held_out = [], [], []
    for path in sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py")):
        if _is_skipped(path):
            continue
        if path in HELD_OUT:
            held_out.append(path)
        elif not _is_test(path):
            library.append(path)
        elif not _tests_held_out(path):
            tests.append(path)
    if not library or not held_out:
        raise FileNotFoundError(f"no standard library source below {root}")
    return Corpus(*(tuple(_read(root, paths, max_bytes)) for paths in (library, tests, held_out)))


def _is_skipped(path: str) -> bool:
    return bool(_SKIPPED_FOLDERS & set(path.split("/"))) or path.startswith(_TABLES)


def _is_test(path: str) -> bool:
    return bool(_TEST_FOLDERS & set(path.split("/")[:-1]))


def _tests_held_out(path: str) -> bool:
    """Return whether a test file belongs to a held-out module, as test_json/test_decode.py to json/decoder.py."""
    names = {f"test_{part}" for module in HELD_OUT for part in module.removesuffix(".py").split("/")}
    parts = path.removesuffix(".py").split("/")
    return any(part in names or part.startswith(tuple(f"{name}_" for name in names)) for part in parts)


def _read(root: Path, paths: list[str], max_bytes: int | None) -> Iterable[Document]:
    num_bytes = 0
    for path in paths:
        try:
            document = Document(path, (root / path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # a few test files are deliberately not UTF-8
            continue
        num_bytes += document.num_bytes
        if max_bytes is not None and num_bytes > max_bytes:
            return
        yield document


def _describe(documents: tuple[Document, ...]) -> dict:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.path}\0{document.text}\0".encode())
    return {
        "num_files": len(documents),
        "num_bytes": sum(document.num_bytes for document in documents),
        "sha256": digest.hexdigest(),
    }
