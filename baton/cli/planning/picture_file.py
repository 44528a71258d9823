"""The file that `--picture` names."""

import sys
from pathlib import Path


class PictureError(Exception):
    """A picture cannot be written; one line that says why."""


def check_place(path: Path | None) -> None:
    """Raise PictureError where a picture cannot be written, as far as that shows before the work that it is of."""
    if path is not None and path.is_dir():
        raise PictureError(f"--picture {path}: a folder")
    if path is not None and not path.parent.is_dir():
        raise PictureError(f"--picture {path}: there is no folder {path.parent}")


def write_picture(path: Path, drawn: str) -> None:
    """Write an SVG and say where it is. Raises PictureError."""
    try:
        path.write_text(drawn)
    except OSError as error:
        raise PictureError(f"--picture {path}: {error.strerror}") from None
    print(f"picture: {path}", file=sys.stderr)
