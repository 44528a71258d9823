"""Run one step in this process and print a line of JSON per check: python -m baton.cli.gpu.step NAME [MODEL]."""

import sys
from importlib import import_module
from pathlib import Path

from baton.cli.gpu.check import sayer


def main() -> int:
    name, *others = sys.argv[1:]
    check = import_module(f"baton.cli.gpu.steps.{name}").check
    check(sayer(name, lambda found: print(found.to_json(), flush=True)), Path(others[0]) if others else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
