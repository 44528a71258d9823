"""Make results the same bits on every host, and name the code that computes them.

torch's libraries are told to add in one order. The code's name differs between builds that may compute different
bits.
"""

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ENGINE = Path(__file__).parents[1]

# MKL: one order for any number of rows and threads (512 rows take as long as without it, a single one up to twice as
# long). oneDNN: all instructions but AMX, whose tiles are chosen by the number of rows.
_ORDER = {"MKL_CBWR": "AUTO,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}

# Folders below baton/engine whose code the results depend on.
FOLDERS = (
    "adapters", "attention", "core", "families", "gpu_ranks", "kv", "layers", "models", "native", "parallel", "recurrent",
    "weights",
)  # fmt: skip
FILES = ("gguf.py", "protocol.py")  # in baton/: where tensors are in a file, and bounds
SUFFIXES = (".py", ".cpp", ".h")


def fix_order_of_sums() -> None:
    """Tell MKL and oneDNN to add in one order, unless the user has set these variables.

    Both read the environment at the first product of a process, so this must be called before.
    """
    for name, value in _ORDER.items():
        os.environ.setdefault(name, value)


@cache
def computing_code(engine: Path = ENGINE) -> str:
    """Return a name with a digest of the code in FOLDERS below `engine`.

    Comments count too, so two workers may have different names for the same results, but never the reverse.
    """
    folders = [f"{engine.name}/{folder}" for folder in FOLDERS]
    return f"code-{digest_of(engine.parent, folders, FILES)[:8]}"


def digest_of(root: Path, folders: Iterable[str], files: Iterable[str] = ()) -> str:
    """Return a digest of the code in these folders and files below `root`, in hex."""
    digest = hashlib.sha256()
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)
    for path in sorted(path for path in (*found, *map(root.joinpath, files)) if path.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
