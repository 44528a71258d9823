"""Files of a model that are not what their names say, or not where they may be. Plain Python, for gateway and engine
alike."""

import os
from pathlib import Path

_POINTER = b"version https://git-lfs"
# Of which transformers makes what is read here.
_SOURCES = {
    "tokenizer.json": ("tekken.json", "tokenizer.model"),
    "model.safetensors": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
}


def why_not_itself(path: Path) -> str | None:
    """Return what stands in place of a file, and what to do: a link that leads nowhere, as a cache that was cleared
    leaves them, or Git LFS's pointer, as a clone without it does; or of what one that is not there can be made. None:
    the file itself, or none that can be read."""
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
    """Return what `path` names below `root`, links followed; None: it leads elsewhere, or names `root` by being empty.
    Raises ValueError for what can name nothing."""
    try:
        found = (root / path).resolve()
    except (ValueError, RuntimeError, OSError) as error:  # a NUL in it; links in a circle, until Python 3.12
        raise ValueError(str(error)) from None
    return found if path and found.is_relative_to(root.resolve()) else None
