"""The `baton` command. Each subcommand is a module with `add_parser(subparsers)` and `run(args) -> exit status`.

Exit status: 0 done, 1 failed, 2 wrong use."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
from importlib import import_module

from baton.service.settings import add_version, make_parser

COMMANDS = {  # and where each is below baton.cli
    "up": "cluster.up", "config": "cluster.config", "certs": "cluster.certs", "rank": "cluster.rank",
    "generate": "client.generate", "chat": "client.chat", "batch": "client.batch", "quantize": "models.quantize",
    "eval": "models.eval", "bench": "client.bench", "top": "cluster.top", "doctor": "cluster.doctor",
    "drain": "cluster.drain", "scale": "cluster.scale", "plan": "planning.plan", "scaler": "planning.scaler", "train-demo": "models.train_demo", "train-draft": "models.train_draft",
}  # fmt: skip
_STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for name, mode in _STREAMS.items():
        if getattr(sys, name) is None:  # closed by who started it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  it stays open
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has ended, as in `baton top | head`
        _leave_stdout()
        return 0
    except KeyboardInterrupt:  # of a command that does not handle it, or that is being imported
        print(" ".join(["baton", *argv[:1]]) + ": interrupted", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _leave_stdout()
        print(f"baton {argv[0]}: {error.strerror}", file=sys.stderr)
        return 1


def _run(argv: list[str]) -> int:
    parser = make_parser("baton", "Large language models over gRPC, prefill and decode on separate workers.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Import only the command that is called: the imports of all of them take long.
    for name in argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS:
        import_module(f"baton.cli.{COMMANDS[name]}").add_parser(subparsers)
    for subparser in subparsers.choices.values():
        add_version(subparser)
    args, unknown = parser.parse_known_args(argv)
    if unknown and argv[0] not in COMMANDS:
        command = next(word for word in argv if word in COMMANDS)
        parser.error(f"options go behind the command: baton {command} {argv[0]}")
    if unknown:
        subparser = subparsers.choices[argv[0]]
        subparser.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest_flag(unknown[0], subparser)}")
    return args.run(args)


def _leave_stdout() -> None:
    """Redirect stdout to /dev/null, since the interpreter flushes it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nearest_flag(word: str, parser: argparse.ArgumentParser) -> str:
    name = word.partition("=")[0].lstrip("-")
    flags = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    flags = [flag for flag in flags if flag.startswith("no-") == name.startswith("no-")]  # never suggest the opposite
    if name in ("host", "port") and "http" in flags:  # as servers with one address call it
        return "; give --listen HOST:PORT for gRPC, --http HOST:PORT for HTTP"
    role, _, plain = name.rpartition(".")
    if role and plain in flags:  # a setting that gateway or workers get through a flag of the command itself
        return f"; did you mean --{plain}?"
    # of flags with the same last part, one without a role wins
    plain_last = sorted(flags, key=lambda flag: "." not in flag)
    by_name = {flag if role else flag.rpartition(".")[2]: flag for flag in plain_last}
    nearest = difflib.get_close_matches(name, by_name, 1, 0.6)
    return f"; did you mean --{by_name[nearest[0]]}?" if nearest else ""


if __name__ == "__main__":
    sys.exit(main())
