"""Record which adapters operators have loaded and not unloaded, in files below --adapter-root, for workers that start
later."""

import hashlib
import json
import logging
import os
import secrets
from pathlib import Path

from baton.service.logs import fields

log = logging.getLogger(__name__)

FOLDER = ".loaded"
_FIELDS = ("model", "identity", "name", "path")


class AdapterRecords:
    """The records of one model, known by its name and weights. Each adapter has a file, so that workers that write at
    the same time do not overwrite each other's records."""

    def __init__(self, root: Path, model_name: str, model_identity: bytes):
        self._folder = root / FOLDER
        self._model = {"model": model_name, "identity": model_identity.hex()}

    def keep(self, name: str, path: str) -> None:
        """Record that `name` stands for the adapter at `path`, below the root. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        record = self._file_of(name)
        unfinished = record.with_suffix(f".{secrets.token_hex(4)}")
        try:
            with unfinished.open("w") as file:
                json.dump({**self._model, "name": name, "path": path}, file)
                file.flush()
                os.fsync(file.fileno())  # otherwise a power loss may leave a named file without its content
            os.replace(unfinished, record)
        finally:
            unfinished.unlink(missing_ok=True)

    def forget(self, name: str) -> bool:
        """Remove the record of `name`; return whether there was one. Raises OSError."""
        record = self._file_of(name)
        if was_noted := record.exists():  # on a read-only file system unlink fails even for a missing file
            record.unlink(missing_ok=True)
        return was_noted

    def is_gone(self, name: str) -> bool:
        """Return whether the record of `name` was removed; False if its folder or file is only unreachable for a
        moment."""
        try:
            os.lstat(self._file_of(name))
        except FileNotFoundError:
            return self._folder.is_dir()
        except OSError:
            pass
        return False

    def read(self) -> list[tuple[str, str]]:
        """Return each name with its path. Files that are no records are logged and skipped. Raises OSError."""
        try:
            files = sorted(self._folder.iterdir())
        except FileNotFoundError:
            return []  # nothing was loaded yet
        read = [_read(file) for file in files if file.suffix == ".json"]
        return [(record["name"], record["path"]) for record in read if record.items() >= self._model.items()]

    def _file_of(self, name: str) -> Path:
        """Return the file of a name. It is named by a digest, because names may be longer than file names and have any
        characters."""
        key = json.dumps([*self._model.values(), name])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(file: Path) -> dict[str, str]:
    """Return the record; an empty one if the file is no record, or was removed meanwhile."""
    try:
        record = json.loads(file.read_bytes())
        if not isinstance(record, dict) or not all(isinstance(record.get(field), str) for field in _FIELDS):
            raise ValueError(f"needs the strings {', '.join(_FIELDS)}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.error("the note of an adapter is passed over %s", fields(file=file, error=error))
        return {}
    return record
