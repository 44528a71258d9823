"""Logs: one line an event on stderr, `2026-11-30T18:10:48.556+01:00 role level message key=value`. Prompts and token
ids never go in."""

import logging
import os
import sys
import time
from datetime import datetime

# In a process's environment, what who keeps it calls it: a role says too little where several of it write one log.
NAME_VARIABLE = "BATON_PROCESS_NAME"

_MAX_VALUE_CHARS = 1000
_QUIET_S = 60.0
_NEEDS_QUOTES = {" ", '"'}
_LEVELS = ("debug", "info", "warning", "error")


def setup(role: str, level: str = "info") -> None:
    """Send the logs of this process to stderr, under its name if it has one, else its role. Raises ValueError for an
    unknown level."""
    if level not in _LEVELS:
        raise ValueError(f"unknown log level {level!r}; one of {', '.join(_LEVELS)}")
    handler = _Handler(sys.stderr)
    handler.setFormatter(_OneLine(os.environ.get(NAME_VARIABLE) or role))
    handler.addFilter(_OnceAMinute("opentelemetry"))  # it says every few seconds that a collector is away
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Drop what gRPC logs, with a traceback, when a caller left just before its answer: it is no error."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


def num_lost() -> int:
    """Count lines that could not be written: the disk is full, or the reader is gone."""
    return _Handler.num_lost


def fields(**values: object) -> str:
    """`key=value key=value`. Values come from anywhere: with spaces or quotes they are quoted, what does not print
    is escaped, and beyond 1,000 characters they are cut."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


class _OnceAMinute(logging.Filter):
    """Let one line a minute through of a library, with the number of those that were left out since the last."""

    def __init__(self, library: str):
        super().__init__(library)
        self._last_at, self._num_left_out = -_QUIET_S, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True  # of others
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
        """The standard one would write a traceback to the same full disk."""
        if isinstance(sys.exc_info()[1], OSError):
            _Handler.num_lost += 1
        else:
            super().handleError(record)


class _OneLine(logging.Formatter):
    def __init__(self, name: str):
        super().__init__(f"%(asctime)s {name.replace('%', '%%')} %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Local, with its offset: hosts may have clocks of several zones."""
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
    """The same on one line, what does not print escaped: nothing in it ends a line, colours a terminal or turns the
    direction of what follows."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
