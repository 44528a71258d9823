"""The `baton` command. Each subcommand is a file with `add_parser(subparsers)` and `run(args) -> exit status`.

Exit status: 0 done, 1 failed, 2 wrong use.
"""

from __future__ import annotations

import sys
from importlib import import_module

from baton.service.settings import add_version, make_parser

COMMANDS = {  # and where each is below baton.cli
    "up": "cluster.up", "certs": "cluster.certs", "generate": "client.generate", "quantize": "models.quantize",
    "eval": "models.eval", "bench": "client.bench", "top": "cluster.top", "doctor": "cluster.doctor",
    "drain": "cluster.drain", "train-demo": "models.train_demo", "train-draft": "models.train_draft",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser("baton", "Large language models over gRPC, prefill and decode on separate workers.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # The command that is called alone: what the others import would keep it waiting.
    for name in argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS:
        import_module(f"baton.cli.{COMMANDS[name]}").add_parser(subparsers)
    for subparser in subparsers.choices.values():
        add_version(subparser)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
