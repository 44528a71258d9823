"""`baton generate`: send one prompt to a running gateway and stream the text to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from baton.cli.client.asking import add_sampling_flags, add_target_flags, explain, open_client, options_of
from baton.client import CallError, make_request
from baton.service.arguments import add_command, whole
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.security.access import read_access
from baton.service.settings import SettingsError
from baton.v1 import inference_pb2 as pb

_EXAMPLES = """
baton generate "def read_lines(path):" --max-tokens 48
git diff | baton generate --chat --system "Write a commit message." --temperature 0
baton generate --chat "Name a city and its country." --schema city.json
baton generate "def f(" -n 3 --seed 1 --temperature 1 --json --logprobs 2
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "generate",
        summary="complete a prompt",
        description="Complete a prompt and stream the text.",
        examples=_EXAMPLES,
    )
    parser.add_argument("prompt", nargs="?", default="-", metavar="PROMPT", help="text, or - for stdin (default: -)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    parser.add_argument("--system", metavar="TEXT", help="message of the system before it; implies --chat")
    add_sampling_flags(parser)
    parser.add_argument("-n", type=whole, metavar="N", help="answers to the same prompt (default: 1)")
    parser.add_argument("--logprobs", type=int, metavar="K", help="of each token and the K best; needs --json")
    parser.add_argument("--schema", type=Path, metavar="FILE", help="keep the answer to this JSON Schema")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_target_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the request and print its answer; return 0 done, 1 failed, 2 wrong use."""
    try:
        if args.logprobs is not None and not args.json:
            raise ValueError("--logprobs needs --json")
        access, request = read_access(args), read_request(args)
    except (ValueError, SettingsError) as error:
        return fail("baton generate", error, WRONG_USE)
    try:
        with open_client(args.target, access) as client, client.send(request) as stream:
            if args.json:
                _print_json(stream, request)
            elif (args.n or 1) > 1:
                _print_choices(stream, args.n)
            else:
                _print_text(stream)
    except CallError as error:
        return fail("baton generate", explain(error, args.target, access), FAILED)
    except UnicodeEncodeError as error:  # the terminal's encoding, or PYTHONIOENCODING
        return fail("baton generate", f"stdout is not UTF-8: {error}", FAILED)
    except ValueError as error:
        return fail("baton generate", f"--target {error}", WRONG_USE)
    except BrokenPipeError:  # the reader has ended, as in `baton generate | head`: main() handles it
        raise
    except OSError as error:
        return fail("baton generate", error, FAILED)
    return 0


def read_request(args: argparse.Namespace) -> pb.GenerateRequest:
    """Return the request that the flags describe; read stdin if it is the prompt. Raises ValueError for values that the
    contract cannot carry, and for a schema that cannot be read."""
    prompt = _from_stdin() if args.prompt == "-" else args.prompt
    if args.chat or args.system is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompt = [*system, {"role": "user", "content": prompt}]
    try:
        request = make_request(prompt, options_of(args))
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8: {error}") from None
    except ValueError as error:
        name = str(error).partition(":")[0]
        raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name, '')}: out of range") from None
    if args.schema is not None:
        try:
            request.constraint.json_schema = args.schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--schema {args.schema}: {getattr(error, 'strerror', None) or error}") from None
    return request


def _from_stdin() -> str:
    try:
        if not sys.stdin.isatty() and (text := sys.stdin.read()):
            return text
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8: {error}") from None
    raise ValueError("no PROMPT: give it, or text on stdin")


def _print_text(stream: Iterable[pb.GenerateResponse]) -> None:
    for message in stream:
        sys.stdout.write(message.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _print_choices(stream: Iterable[pb.GenerateResponse], num_choices: int) -> None:
    """Print each answer whole, since their tokens arrive interleaved."""
    texts = [""] * num_choices
    for message in stream:
        texts[message.index] += message.text
    for index, text in enumerate(texts):
        sys.stdout.write(f"--- {index + 1} of {num_choices}\n{text}\n")


def _print_json(stream: Iterable[pb.GenerateResponse], request: pb.GenerateRequest) -> None:
    answer: dict[str, Any] = {}
    choices = [{"text": "", "token_ids": []} for _ in range(request.sampling.n or 1)]
    for message in stream:
        _add(choices[message.index], message)
        if message.request_id:
            answer["request_id"] = message.request_id
        if message.HasField("seed"):
            answer["seed"] = message.seed
        for name in ("usage", "timing"):
            if message.HasField(name):
                part = getattr(message, name)
                values = {entry.name: getattr(part, entry.name) for entry in part.DESCRIPTOR.fields}
                answer[name] = {
                    key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()
                }
    json.dump((choices[0] if len(choices) == 1 else {"choices": choices}) | answer, sys.stdout)
    sys.stdout.write("\n")


def _add(choice: dict[str, Any], message: pb.GenerateResponse) -> None:
    """Add a message to what has arrived of its choice."""
    choice["text"] += message.text
    choice["token_ids"] += message.token_ids
    if message.reasoning:
        choice["reasoning"] = choice.get("reasoning", "") + message.reasoning
    for name in ("tool_calls", "logprobs"):
        if parts := getattr(message, name):
            choice[name] = choice.get(name, []) + [
                MessageToDict(each, preserving_proto_field_name=True) for each in parts
            ]
    if message.finish_reason:
        choice["finish_reason"] = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
