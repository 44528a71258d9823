"""Report a model that cannot be served, and read the JSON files of model folders."""

import json
from pathlib import Path

from baton.model_files import why_not_itself


class ModelError(Exception):
    """A model that cannot be served. The message is one line that names the file, and the tensor if it is about one."""


def read_json(path: Path) -> dict:
    """Return the JSON object in a file of the model folder. Raises ModelError, which names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: {why_not_itself(path) or 'no such file'}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {why_not_itself(path) or f'not readable as JSON ({error})'}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
