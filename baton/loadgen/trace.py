"""Recorded request traces in the two published formats: Mooncake's JSON lines and Azure's CSV."""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

MOONCAKE_BLOCK = 512  # prompt tokens per hash id in Mooncake's traces
_LONGEST_STAMP = 40  # of a longer one an error has no more
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """An invalid trace; one line with the file, the place in it, and the fault."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request. Entries whose `hash_ids` begin alike share a prefix of `block` tokens per id. Without ids, prefixes
    are unknown and the prompt shares nothing."""

    at_s: float  # after the first entry
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()
    block: int = MOONCAKE_BLOCK


def read_trace(path: Path) -> list[TraceEntry]:
    """Return all entries in order of time; a file named .gz is unpacked. Raises TraceError."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = io.StringIO(data.decode("utf-8-sig"))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    name = path.name.removesuffix(".gz")
    reader = _mooncake if name.endswith(".jsonl") else _azure if name.endswith(".csv") else None
    if reader is None:
        raise TraceError(f"{path}: a trace is a .jsonl (Mooncake) or a .csv (Azure), packed with gzip or not")
    try:
        entries = sorted(reader(lines), key=lambda entry: entry.at_s)
    except _BadLine as error:
        raise TraceError(f"{path}: line {error.number}: {error.what}") from None
    except csv.Error as error:
        raise TraceError(f"{path}: not CSV: {error}") from None
    if not entries:
        raise TraceError(f"{path}: no requests in it")
    first = entries[0].at_s
    return [TraceEntry(entry.at_s - first, entry.num_prompt, entry.num_output, entry.hash_ids) for entry in entries]


class _BadLine(Exception):
    def __init__(self, number: int, what: str):
        super().__init__(what)
        self.number, self.what = number, what


def _mooncake(lines: Iterable[str]) -> Iterator[TraceEntry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            hash_ids = tuple(map(int, fields.get("hash_ids", ())))
            entry = TraceEntry(
                fields["timestamp"] / 1000, int(fields["input_length"]), int(fields["output_length"]), hash_ids
            )
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            raise _BadLine(number, f"not a Mooncake request ({_describe(error)})") from None
        yield _checked(entry, number)


def _azure(lines: Iterable[str]) -> Iterator[TraceEntry]:
    reader = csv.DictReader(lines)
    missing = [column for column in _AZURE_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise _BadLine(1, f"no column {missing[0]}; an Azure trace has {', '.join(_AZURE_COLUMNS)}")
    for number, row in enumerate(reader, 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:_LONGEST_STAMP])  # in UTC unless it has a zone
            at_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
            entry = TraceEntry(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError) as error:
            raise _BadLine(number, f"not an Azure request ({_describe(error)})") from None
        yield _checked(entry, number)


def _checked(entry: TraceEntry, number: int) -> TraceEntry:
    if not math.isfinite(entry.at_s):
        raise _BadLine(number, f"arrives at {entry.at_s}")
    if entry.num_prompt < 1 or entry.num_output < 0:
        raise _BadLine(number, f"{entry.num_prompt} prompt and {entry.num_output} output tokens")
    return entry


def _describe(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
