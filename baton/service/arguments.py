"""Subcommands and values of their arguments. Values are checked as argparse reads them, so it names the wrong one and
exits with status 2."""

import argparse
import math

from baton.addresses import AddressError, split_address


def add_command(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",  # pyright: ignore[reportPrivateUsage]
    name: str,
    *,
    summary: str,
    description: str,
    examples: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Return the parser of the subcommand `name`. Its help ends with `examples`, one a line."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=description,
        usage=usage,
        epilog=_EXAMPLES + "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines()),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


_EXAMPLES = "examples:\n"


class _Formatter(argparse.HelpFormatter):
    """Wrap all text except the examples, which users copy."""

    def __init__(self, prog: str, width: int | None = None) -> None:
        super().__init__(prog, max_help_position=28, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


def positive(text: str) -> float:
    """Parse a number above 0."""
    return _above_zero(float, "a number", text)


def whole(text: str) -> int:
    """Parse a whole number, at least 1."""
    return _above_zero(int, "a whole number", text)


def port(text: str) -> int:
    """Parse a port, from 1 to 65535."""
    value = whole(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: must be from 1 to 65535")
    return value


def host_port(text: str) -> str:
    """HOST:PORT, as it was written."""
    try:
        split_address(text)
    except AddressError as error:
        scheme, mark, _ = text.partition("://")
        wrong = f"{text!r} is not HOST:PORT: give it without {scheme}{mark}" if mark else str(error)
        raise argparse.ArgumentTypeError(wrong) from None
    return text


def host_port_list(text: str) -> str:
    """HOST:PORT, or several with commas between, as it was written."""
    host_ports(text)
    return text


def host_ports(text: str) -> list[str]:
    """HOST:PORT, with commas between several."""
    return [host_port(part.strip()) for part in text.split(",") if part.strip()]


def _above_zero(kind: type, what: str, text: str):
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0")
    return value
