"""Which adapters operators have loaded and not unloaded: records beside the adapters, below --adapter-root, for workers
that start later."""

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
    """Those of one model: its name and its weights. A file for each adapter, so that workers that write at once lose
    nothing of each other."""

    def __init__(self, root: Path, model_name: str, model_identity: bytes):
        self._folder = root / FOLDER
        self._model = {"model": model_name, "identity": model_identity.hex()}

    def keep(self, name: str, path: str) -> None:
        """Note that a name stands for the adapter at `path`, below the root. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        record = self._file_of(name)
        unfinished = record.with_suffix(f".{secrets.token_hex(4)}")
        try:
            with unfinished.open("w") as file:
                json.dump({**self._model, "name": name, "path": path}, file)
                file.flush()
                os.fsync(file.fileno())  # else a host that loses power may keep the name of a file without its content
            os.replace(unfinished, record)
        finally:
            unfinished.unlink(missing_ok=True)

    def forget(self, name: str) -> bool:
        """Return whether the name was noted. Raises OSError."""
        record = self._file_of(name)
        if was_noted := record.exists():  # where nothing can be written unlink fails also for what is not there
            record.unlink(missing_ok=True)
        return was_noted

    def is_gone(self, name: str) -> bool:
        """Return whether the note of a name was taken away; a folder or a file that is away for a moment says
        nothing."""
        try:
            os.lstat(self._file_of(name))
        except FileNotFoundError:
            return self._folder.is_dir()
        except OSError:
            pass
        return False

    def read(self) -> list[tuple[str, str]]:
        """Return each name and its path. Files that are no records are logged and passed over. Raises OSError."""
        try:
            files = sorted(self._folder.iterdir())
        except FileNotFoundError:
            return []  # nothing was loaded yet
        read = [_read(file) for file in files if file.suffix == ".json"]
        return [(record["name"], record["path"]) for record in read if record.items() >= self._model.items()]

    def _file_of(self, name: str) -> Path:
        """Names may have more bytes than a file's, and any characters."""
        key = json.dumps([*self._model.values(), name])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(file: Path) -> dict[str, str]:
    """Return nothing where a file is no record, or was unloaded meanwhile."""
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
