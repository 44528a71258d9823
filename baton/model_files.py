"""Explain model files that are missing, or are not what their names say. Plain Python, for gateway and engine alike."""

import os
from pathlib import Path

_POINTER = b"version https://git-lfs"
# Files from which transformers makes the key, which is read here.
_SOURCES = {
    "tokenizer.json": ("tekken.json", "tokenizer.model"),
    "model.safetensors": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
}


def why_not_itself(path: Path) -> str | None:
    """Return why a file is not usable, with advice; None if it is the file itself or cannot be read. It may be a
    dangling link, as a cleared cache leaves, a Git LFS pointer from a clone without LFS, or missing though it can be
    made from another file."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which is not there; fetch the model again"
    try:
        with open(path, "rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except FileNotFoundError:
        beside = (name for name in _SOURCES.get(path.name, ()) if (path.parent / name).exists())
        return next((f"is not there; make it of {name}, as docs/models.md says (Weights)" for name in beside), None)
    except OSError:
        return None
    return "is Git LFS's pointer to the file; fetch the file itself: git lfs pull" if is_pointer else None


def below_root(root: Path, path: str) -> Path | None:
    """Return the path that `path` names below `root`, with links followed; None if it leads elsewhere or is empty.
    Raises ValueError for an invalid path."""
    try:
        found = (root / path).resolve()
    except (ValueError, RuntimeError, OSError) as error:  # for a NUL in it, or a cycle of links until Python 3.12
        raise ValueError(str(error)) from None
    return found if path and found.is_relative_to(root.resolve()) else None
