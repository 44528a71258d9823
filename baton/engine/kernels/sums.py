"""Name the order in which the Triton kernels sum: two workers whose kernels sum differently compute different bits."""

import ast
import hashlib
from functools import cache
from pathlib import Path

ENGINE = Path(__file__).parents[1]
# Below baton/engine: the kernels whose sums end in KV, and the code that chooses their tiles, splits and segments.
SOURCES = (
    "kernels/linear.py", "kernels/grouped.py", "kernels/low_rank.py", "kernels/paged_attention.py", "kernels/rows.py",
    "kernels/kv_write.py", "kernels/tiles.py", "kernels/quantize.py", "kernels/state/inputs.py", "kernels/state/folds.py",
    "kernels/state/chunks.py", "kernels/state/softplus.py", "kernels/state/finish.py", "recurrent/gpu.py",
    "attention/triton_paged.py", "parallel/add_ranks.py", "layers/linear/triton.py", "layers/grouped.py",
    "adapters/gpu_low_rank.py", "models/gpu_layers.py", "weights/on_gpu.py",
)  # fmt: skip


@cache
def order_of_sums(engine: Path = ENGINE) -> str:
    """Return Triton's version, whose compiler orders the sums within a tile, and a digest of the code of SOURCES below
    the folder `engine`. An equal name promises equal bits; a change of code that keeps the order makes workers unlike
    needlessly, never the reverse."""
    import triton  # an optional dependency

    digest = hashlib.sha256("".join(code_digest(engine / name) for name in SOURCES).encode()).hexdigest()
    return f"triton{triton.__version__}-{digest[:8]}"


def code_digest(path: Path) -> str:
    """Return a digest of a file's code, without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]
