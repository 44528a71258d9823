"""`baton generate`: one prompt to a running gateway, its text streamed to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

import grpc

from baton.service.errors import from_rpc_error
from baton.service.net.client import explain_failure
from baton.service.security.access import add_access_flags, read_access
from baton.service.settings import SettingsError
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50051"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "generate", help="complete a prompt", description="Complete a prompt and stream the text.", allow_abbrev=False
    )
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="gateway (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens at most (default: the gateway's)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: greedy (default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="for the same text again (default: drawn)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 done, 1 failed, 2 wrong use."""
    try:
        request, access = make_request(args), read_access(args)
    except (ValueError, SettingsError) as error:
        return _fail(str(error), 2)
    with access.channel(args.target, blocking=True) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=access.metadata)
        try:
            _print_json(stream) if args.json else _print_text(stream)
        except grpc.RpcError as call:
            error = from_rpc_error(call)
            return _fail(explain_failure(args.target, error.code, error.message, access), 1)
        except KeyboardInterrupt:
            stream.cancel()
            return _fail("interrupted", 1)
    return 0


def make_request(args: argparse.Namespace) -> pb.GenerateRequest:
    """Leaves unset what was not given. Raises ValueError for a number that the contract cannot carry."""
    request = pb.GenerateRequest(text=args.prompt)
    for message, name in (
        (request.sampling, "temperature"),
        (request.sampling, "seed"),
        (request.stopping, "max_tokens"),
    ):
        value = getattr(args, name)
        if value is not None:
            try:
                setattr(message, name, value)
            except ValueError:
                raise ValueError(f"--{name.replace('_', '-')} {value}: out of range") from None
    return request


def _print_text(stream: Iterable[pb.GenerateResponse]) -> None:
    for message in stream:
        sys.stdout.write(message.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _print_json(stream: Iterable[pb.GenerateResponse]) -> None:
    answer: dict[str, Any] = {"text": "", "token_ids": []}
    for message in stream:
        answer["text"] += message.text
        answer["token_ids"] += message.token_ids
        if message.request_id:
            answer["request_id"] = message.request_id
        if message.HasField("seed"):
            answer["seed"] = message.seed
        if message.finish_reason:
            answer["finish_reason"] = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
        for name in ("usage", "timing"):
            if message.HasField(name):
                part = getattr(message, name)
                answer[name] = {entry.name: getattr(part, entry.name) for entry in part.DESCRIPTOR.fields}
    json.dump(answer, sys.stdout)
    sys.stdout.write("\n")


def _fail(message: str, status: int) -> int:
    print(f"baton generate: {message}", file=sys.stderr)
    return status
