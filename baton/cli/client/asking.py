"""What the commands that ask a gateway share: flags, the client, and the one-line message of a failed call."""

from __future__ import annotations

import argparse
from typing import Any

import grpc

from baton.client import CallError, Client, GenerateOptions, RetryPolicy
from baton.service.arguments import host_port_list
from baton.service.net.client import explain_failure
from baton.service.security.access import Access, add_access_flags

DEFAULT_TARGET = "127.0.0.1:50051"
# retries take less than a second in all, so that a person at a terminal soon hears that no gateway answers
_RETRY = RetryPolicy(max_attempts=5)
# Flags that set fields of the request.
_OPTIONS = ("model", "max_tokens", "temperature", "seed", "stop", "n", "logprobs")


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the gateway's address and the caller's credentials."""
    parser.add_argument(
        "--target",
        type=host_port_list,
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help="gateway, or several with commas between (default: %(default)s)",
    )
    add_access_flags(parser)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the model, sampling and the end of the answer."""
    parser.add_argument("--model", metavar="NAME", help="of a gateway that serves several")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens at most (default: the gateway's)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: greedy (default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="for the same text again (default: drawn)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")


def options_of(args: argparse.Namespace) -> GenerateOptions:
    """Return the options that were given as flags."""
    given: dict[str, Any] = {name: getattr(args, name, None) for name in _OPTIONS}
    return GenerateOptions(**{name: value for name, value in given.items() if value is not None})


def open_client(target: str, access: Access) -> Client:
    """Return a client of the gateway at `target`. Raises ValueError, OSError."""
    return Client(target, retry=_RETRY, **access.for_client())


def is_too_large(error: CallError) -> bool:
    """Return whether a request had more bytes than the gateway takes: gRPC refuses it, in words of its own."""
    return (
        error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.reason and "larger than max" in error.message
    )


def explain(error: CallError, target: str, access: Access) -> str:
    """Return one line about a failed call."""
    if is_too_large(error):
        from gateway.request.validation import MAX_REQUEST_BYTES  # here: it would slow down each start

        return f"{target}: the request is larger than the {MAX_REQUEST_BYTES} bytes that a gateway takes"
    if "," in target:
        return f"{target}: {error}"
    return explain_failure(target, error.code(), error.message, access)
