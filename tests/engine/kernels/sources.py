"""The table of what kernels take of an H100's multiprocessor (kernel_resources.py), and whether it is of today's
sources."""

import json
from pathlib import Path

from baton.engine.kernels.sums import code_digest

TABLE = Path(__file__).parent / "sm90.json"
KERNELS = Path(__file__).parents[3] / "baton/engine/kernels"


def read_table() -> dict:
    return json.loads(TABLE.read_text())


def source_digests() -> dict[str, str]:
    """Return a digest of each module of kernels, by name: of its code, without comments and docstrings."""
    return {path.stem: code_digest(path) for path in sorted(KERNELS.glob("*.py")) if "@triton.jit" in path.read_text()}
