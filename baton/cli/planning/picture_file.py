"""The file that `--picture` names."""

import sys
from pathlib import Path


class PictureError(Exception):
    """A picture cannot be written; one line that says why."""


def check_place(path: Path | None) -> None:
    """Check that the picture can be written, as far as that is known before the work. Raises PictureError."""
    if path is not None and path.is_dir():
        raise PictureError(f"--picture {path}: a folder")
    if path is not None and not path.parent.is_dir():
        raise PictureError(f"--picture {path}: there is no folder {path.parent}")


def write_picture(path: Path, drawn: str) -> None:
    """Write an SVG and print its path. Raises PictureError."""
    try:
        path.write_text(drawn)
    except OSError as error:
        raise PictureError(f"--picture {path}: {error.strerror}") from None
    print(f"picture: {path}", file=sys.stderr)
