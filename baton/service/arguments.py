"""Values of command-line arguments, checked as they are read: argparse says which one is wrong, and ends with 2."""

import argparse


def positive(text: str) -> float:
    """A number above 0."""
    return _above_zero(float, "a number", text)


def whole(text: str) -> int:
    """A whole number, at least 1."""
    return _above_zero(int, "a whole number", text)


def _above_zero(kind: type, what: str, text: str):
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0")
    return value
