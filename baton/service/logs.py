"""Logs: one line an event on stderr, `HH:MM:SS.mmm role level message key=value`. Prompts and token ids never go in."""

import logging
import sys

_LEVELS = ("debug", "info", "warning", "error")


def setup(role: str, level: str = "info") -> None:
    """Send the logs of this process to stderr. Raises ValueError for an unknown level."""
    if level not in _LEVELS:
        raise ValueError(f"unknown log level {level!r}; one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def fields(**values: object) -> str:
    """`key=value key=value`, values with spaces in quotes."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


class _OneLine(logging.Formatter):
    def __init__(self, role: str):
        super().__init__(f"%(asctime)s.%(msecs)03d {role} %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "").replace("\n", " | ")


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or not text else text
