"""Logs: one line per event on stderr, `2026-11-30T18:10:48.556+01:00 role level message key=value`. They never hold
prompts or token ids."""

import logging
import os
import sys
import time
from datetime import datetime

# The environment variable by which a process's keeper names it: the role does not identify a line when several
# processes of one role write to one log.
NAME_VARIABLE = "BATON_PROCESS_NAME"

_MAX_VALUE_CHARS = 1000
_QUIET_S = 60.0
_NEEDS_QUOTES = {" ", '"'}
_LEVELS = ("debug", "info", "warning", "error")


def setup(role: str, level: str = "info") -> None:
    """Send the logs of this process to stderr, under the name in NAME_VARIABLE if it is set, else under `role`. Raises
    ValueError for an unknown level."""
    if level not in _LEVELS:
        raise ValueError(f"unknown log level {level!r}; one of {', '.join(_LEVELS)}")
    handler = _Handler(sys.stderr)
    handler.setFormatter(_OneLine(os.environ.get(NAME_VARIABLE) or role))
    handler.addFilter(_is_news)
    handler.addFilter(_OnceAMinute("opentelemetry"))  # it repeats every few seconds that a collector cannot be reached
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record is worth logging. gRPC logs a traceback when a caller left just before its answer, and
    for each path and value of metadata that is no UTF-8: with the value, which may be a key, and before the guard is
    asked."""
    if record.name not in ("root", "grpc._cython.cygrpc"):
        return True
    said = record.getMessage()
    is_a_path = said.startswith("Unexpected [UnicodeDecodeError]") and not said.isascii()
    return not (said.startswith(("ExecuteBatchError raised in core", "Invalid encoding on b")) or is_a_path)


def num_lost() -> int:
    """Return the number of lines that could not be written, because the disk is full or the reader is gone."""
    return _Handler.num_lost


def fields(**values: object) -> str:
    """Return `key=value key=value`. Values come from anywhere, so a value with spaces or quotes is quoted, characters
    that do not print are escaped, and a value is cut after 1,000 characters."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


class _OnceAMinute(logging.Filter):
    """Let one line of a library through each minute, with the number of lines that were dropped since the previous
    one."""

    def __init__(self, library: str):
        super().__init__(library)
        self._last_at, self._num_left_out = -_QUIET_S, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True  # a record of another library
        if (at := time.monotonic()) - self._last_at < _QUIET_S:
            self._num_left_out += 1
            return False
        if self._num_left_out:
            record.msg, record.args = f"{record.getMessage()} ({self._num_left_out} more such lines before)", None
        self._last_at, self._num_left_out = at, 0
        return True


class _Handler(logging.StreamHandler):
    num_lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that the disk refused. The standard handler would write a traceback to the same full disk."""
        if isinstance(sys.exc_info()[1], OSError):
            _Handler.num_lost += 1
        else:
            super().handleError(record)


class _OneLine(logging.Formatter):
    def __init__(self, name: str):
        super().__init__(f"%(asctime)s {name.replace('%', '%%')} %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return local time with its UTC offset, since hosts may be in several time zones."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(map(printable, super().format(record).splitlines()))


def _quoted(value: object) -> str:
    text = str(value)
    if len(text) > _MAX_VALUE_CHARS:
        text = f"{text[:_MAX_VALUE_CHARS]}..."
    if text.isprintable() and text and not _NEEDS_QUOTES & set(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(escaped)}"'


def printable(text: str) -> str:
    """Return the text on one line with every character that does not print escaped: nothing in it can end a line,
    colour a terminal or reverse the direction of the text that follows."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
