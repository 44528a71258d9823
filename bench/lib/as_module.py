"""Run a bench that was started by its path as the module that it is."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run() -> None:
    """Continue `python bench/NAME.py` as `python -m bench.NAME`, from any folder; end with its exit status.

    A script's own folder heads the path, where bench/gateway.py would be found in place of the gateway."""
    name = Path(sys.argv[0]).stem
    sys.path[0] = str(ROOT)
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    sys.exit()
