"""What all processes of one worker have in common: the code that they run."""

from functools import cache
from pathlib import Path

from baton.engine.core.reproducible import digest_of

PACKAGES = Path(__file__).parents[3]
CODE = ("baton/engine", "baton/service", "baton/worker", "kvtransfer")  # what a rank is told, computes and gives
FILES = ("baton/gguf.py", "baton/model_files.py", "baton/protocol.py", "baton/sampling_params.py")


@cache
def build_digest(packages: Path = PACKAGES) -> str:
    """Return a digest of the code of CODE and FILES below a folder. A version's number would not do: between two
    releases what is said among ranks changes, and what they compute."""
    return digest_of(packages, CODE, FILES)[:16]
