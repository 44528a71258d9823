"""The table of what kernels take of an H100's multiprocessor (kernel_resources.py), and whether it is of today's
sources."""

import ast
import hashlib
import json
from pathlib import Path

TABLE = Path(__file__).parent / "sm90.json"
KERNELS = Path(__file__).parents[3] / "baton/engine/kernels"


def read_table() -> dict:
    return json.loads(TABLE.read_text())


def source_digests() -> dict[str, str]:
    """Return a digest of each module of kernels, by name: of its code, without comments and docstrings."""
    return {path.stem: _digest(path) for path in sorted(KERNELS.glob("*.py")) if "@triton.jit" in path.read_text()}


def _digest(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]
