"""Commands of models, called in this process."""

import argparse

from baton.cli.models import eval as evaluate


def call(command, *words) -> int:
    """Return the exit status of `baton` with this command and these words."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    name = "eval" if command is evaluate else "quantize"
    args = parser.parse_args([name, *map(str, words)])
    return args.run(args)
