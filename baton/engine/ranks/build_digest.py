"""What all processes of one worker have in common: the code that they run."""

import hashlib
from functools import cache
from pathlib import Path

PACKAGES = Path(__file__).parents[3]
CODE = ("baton/engine", "baton/worker", "kvtransfer")  # what a rank is told, computes and gives
SUFFIXES = (".py", ".cpp", ".h")


@cache
def build_digest(packages: Path = PACKAGES) -> str:
    """Return a digest of the code of CODE below a folder. A version's number would not do: between two releases what is said
    among ranks changes, and what they compute."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (packages / folder).rglob("*") if path.suffix in SUFFIXES):
        digest.update(f"{path.relative_to(packages).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
