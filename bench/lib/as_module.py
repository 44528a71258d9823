"""Run a bench that was started by its path as a module."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run() -> None:
    """Continue `python bench/NAME.py` as `python -m bench.NAME`, from any folder, and exit with its status.

    Otherwise the script's folder would be first on the path, and bench/gateway.py would hide the gateway."""
    name = Path(sys.argv[0]).stem
    sys.path[0] = str(ROOT)
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    sys.exit()
