"""The file with a batch's results: read the existing ones, then append more."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from baton.cli.client.batch_lines import Json
from gateway.http.wire.encoding import to_bytes

_BEGIN = b'{"id":"batch_req_'  # of each line


class ResultsFile:
    """The results file, open in one process only."""

    def __init__(self, path: Path):
        """Open and lock the file. Raises ValueError if it is no results file or another process has it open;
        OSError."""
        if path.exists() and not path.is_file():
            raise ValueError(f"--output {path} is no regular file: its results are read when it is run again")
        self.path, self.num_added, self.num_failed = path, 0, 0
        self._file, self._end = path.open("ab", buffering=0), 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{path}: another `baton batch` writes it") from None
        except OSError:  # the file system has no locks
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def read(self) -> Iterator[Json]:
        """Yield the complete results. Raises ValueError for a line that is neither a result nor the beginning of
        one."""
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                result = _result_in(line)
                if result is None:
                    if not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
                        return
                    raise ValueError(f"{self.path}:{number} is no result of a batch: choose another --output")
                self._end += len(line)
                yield result

    def cut(self) -> None:
        """Cut off the partial last line that an interrupted run has left."""
        self._file.truncate(self._end)

    def add(self, result: Json) -> None:
        """Append a result. Raises OSError."""
        left = to_bytes(result) + b"\n"
        while left:  # write without a buffer: on a full disk a buffer's rest would be written again at the end
            left = left[self._file.write(left) :]
        self.num_added += 1
        self.num_failed += result["error"] is not None or result["response"]["status_code"] != 200


def _result_in(line: bytes) -> Json | None:
    try:
        result = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None
