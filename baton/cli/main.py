"""The `baton` command. Each subcommand is a file with `add_parser(subparsers)` and `run(args) -> exit status`.

Exit status: 0 done, 1 failed, 2 wrong use.
"""

from __future__ import annotations

import sys

from baton.cli import bench, certs, doctor, drain, generate, quantize, top, train_demo, train_draft, up
from baton.cli import eval as evaluate
from baton.service.settings import add_version, make_parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("baton", "Large language models over gRPC, prefill and decode on separate workers.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (up, certs, generate, quantize, evaluate, bench, top, doctor, drain, train_demo, train_draft):
        command.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        add_version(subparser)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
