"""`baton chat`: a conversation in the terminal, one message a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module

from baton.cli.client.asking import add_sampling_flags, add_target_flags, explain, open_client, options_of
from baton.client import CallError, Client, GenerateOptions
from baton.service.arguments import add_command
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.security.access import Access, read_access
from baton.service.settings import SettingsError

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


_EXAMPLES = """
baton chat
baton chat --system "Answer in one sentence." --temperature 0 --target host:50051 --tls-ca certs/ca.crt --api-key-file certs/api-key
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "chat",
        summary="talk with the model in the terminal",
        description="Each line is a message. Ctrl-C ends an answer, Ctrl-D the conversation.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--system", metavar="TEXT", help="message of the system, before all others")
    add_sampling_flags(parser)
    add_target_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hold a conversation; return 0 done, 1 failed, 2 wrong use."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        access = read_access(args)
        with open_client(args.target, access) as client:
            conversation = TerminalChat(client, args.system, options_of(args), is_terminal)
            for line in _lines(is_terminal):
                if (status := _answer_turn(conversation, line, args, access)) and not is_terminal:
                    return status
    except (ValueError, SettingsError) as error:
        return fail("baton chat", error, WRONG_USE)
    except OSError as error:
        return fail("baton chat", error, FAILED)
    return 0


def _answer_turn(conversation: TerminalChat, line: str, args: argparse.Namespace, access: Access) -> int:
    """Send one message and print its answer; print one line on stderr if the call fails. Return 0 done, 1 failed."""
    try:
        conversation.say(line)
    except CallError as error:
        return fail("baton chat", explain(error, args.target, access), FAILED)
    return 0


class TerminalChat:
    """A conversation: the messages so far."""

    def __init__(self, client: Client, system: str | None, options: GenerateOptions, is_terminal: bool):
        self._client, self._options, self._is_terminal = client, options, is_terminal
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> None:
        """Send a message of the user and print the answer as it streams; Ctrl-C ends it and keeps what has arrived.
        Raises CallError, after which the message is not part of the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        with self._client.stream(messages, **self._options) as stream:
            try:
                for message in stream:
                    answer += message.text  # before it is shown, since the user may press Ctrl-C as soon as it is
                    if message.reasoning and self._is_terminal:
                        sys.stdout.write(f"{_DIM}{message.reasoning}{_PLAIN}")
                    sys.stdout.write(message.text)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                sys.stdout.write(" [ended]")
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield each line that is not empty. On a terminal Ctrl-C discards the line. Raises ValueError."""
    if not is_terminal:
        try:
            for line in sys.stdin:
                line.encode()  # some locales read bytes that are not UTF-8 as surrogates
                if line.strip():
                    yield line.rstrip("\n")
        except UnicodeError as error:
            raise ValueError(f"stdin is not UTF-8: {error}") from None
        return
    import_module("readline")  # makes input() editable, with a history
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if line.strip():
            yield line
