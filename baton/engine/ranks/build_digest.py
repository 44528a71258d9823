"""Identify the code that all processes of one worker have to share."""

from functools import cache
from pathlib import Path

from baton.engine.core.reproducible import digest_of

PACKAGES = Path(__file__).parents[3]
# Code that decides what ranks say to each other and compute.
CODE = ("baton/engine", "baton/service", "baton/worker", "kvtransfer")
FILES = ("baton/gguf.py", "baton/model_files.py", "baton/protocol.py", "baton/sampling_params.py")


@cache
def build_digest(packages: Path = PACKAGES) -> str:
    """Return a digest of the code of CODE and FILES below a folder. A version number would not do: between two releases
    the messages among ranks change, and what they compute."""
    return digest_of(packages, CODE, FILES)[:16]
