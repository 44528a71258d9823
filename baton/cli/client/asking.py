"""What the commands that ask a gateway share: their flags, the client, and one line for a failure."""

from __future__ import annotations

import argparse
from typing import Any

from baton.client import CallError, Client, GenerateOptions, RetryPolicy
from baton.service.net.client import explain_failure
from baton.service.security.access import Access, add_access_flags

DEFAULT_TARGET = "127.0.0.1:50051"
_RETRY = RetryPolicy(max_attempts=5)  # under a second in all: a person at a terminal is told soon that nobody is there
# Flags that are the contract's fields.
_OPTIONS = ("model", "max_tokens", "temperature", "seed", "stop", "n", "logprobs")


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Which gateway, and as whom."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help="gateway, or several with commas between (default: %(default)s)",
    )
    add_access_flags(parser)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Which model answers, how the answer is drawn and where it ends."""
    parser.add_argument("--model", metavar="NAME", help="of a gateway that serves several")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens at most (default: the gateway's)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: greedy (default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="for the same text again (default: drawn)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")


def options_of(args: argparse.Namespace) -> GenerateOptions:
    """Return what was given."""
    given: dict[str, Any] = {name: getattr(args, name, None) for name in _OPTIONS}
    return GenerateOptions(**{name: value for name, value in given.items() if value is not None})


def open_client(target: str, access: Access, retry: RetryPolicy = _RETRY) -> Client:
    """Return a client of the gateway at `target`. Raises ValueError, OSError."""
    return Client(target, retry=retry, **access.for_client())


def explain(error: CallError, target: str, access: Access) -> str:
    """Return one line about a call that failed."""
    if "," in target:
        return f"{target}: {error}"
    return explain_failure(target, error.code(), error.message, access)
