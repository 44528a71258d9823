"""Decide which model workers may serve: one that the operator lists, or that of workers that the operator has named.

Otherwise the first worker to register would decide for all.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from baton.service.logs import fields

LOOK_S = 1.0  # between two looks for a changed file
_DIGEST = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class ModelIdentities:
    """The models that workers may serve. `given`: digests in hex, or one `@FILE` with a digest on each line. Without
    any the first worker decides or, if the operator has named workers, the first of those. Raises ValueError, one
    line."""

    def __init__(self, given: Sequence[str], are_workers_named: bool):
        self._path = Path(given[0][1:]) if len(given) == 1 and given[0].startswith("@") else None
        self._are_workers_named = are_workers_named
        self._listed = self._read_file() if self._path else _digests(given)
        self._is_file_good = True

    @property
    def is_file(self) -> bool:
        """Whether the list is in a file, which may change."""
        return self._path is not None

    def lists(self, identity: bytes) -> bool:
        """Return whether the operator's list allows workers of this model; without a list it does."""
        return not self._listed or identity in self._listed

    def read_again(self) -> bool:
        """Read the file again and return whether the list has changed. A file that cannot be read changes nothing."""
        try:
            listed = self._read_file()
        except ValueError as error:
            if self._is_file_good:
                log.error("--model-identity: the list that was read before stays in use %s", fields(why=error))
            self._is_file_good = False
            return False
        self._is_file_good, before, self._listed = True, self._listed, listed
        return listed != before

    def why_not(self, identity: bytes, served: bytes | None, is_configured: bool, decided: bytes = b"") -> str | None:
        """Return why a worker of this model cannot be used, or None. `served`: the model of the workers in use;
        `is_configured`: the operator has named this worker; `decided`: the model that such a worker decided before."""
        model = f"serves the model {identity.hex()}"
        if not self.lists(identity):
            return f"{model}, which --model-identity does not list"
        if served not in (None, identity):
            return f"{model}; the workers that came first have another: config or weights differ"
        is_decided = served is not None or is_configured or identity == decided
        if not is_decided and self._are_workers_named and not self._listed:
            return f"{model}; which one is served is decided by workers of --prefill-workers and --decode-workers"
        return None

    def _read_file(self) -> frozenset[bytes]:
        try:
            lines = [line.partition("#")[0].strip() for line in self._path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path}: {getattr(error, 'strerror', None) or error}") from None
        if not any(lines):
            raise ValueError(f"{self._path}: lists no model")
        try:
            return _digests([line for line in lines if line])
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from None


def _digests(texts: Sequence[str]) -> frozenset[bytes]:
    for text in texts:
        if not _DIGEST.fullmatch(text):
            raise ValueError(f"{text[:80]!r} is not a model digest: 64 hex digits, as a worker's ready line has them")
    return frozenset(map(bytes.fromhex, texts))
