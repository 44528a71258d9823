"""The error of a model, in one line; and files that must be JSON."""

import json
from pathlib import Path

from baton.model_files import why_not_itself


class ModelError(Exception):
    """A model that cannot be served; the message is one line that names the file, and the tensor where there is one."""


def read_json(path: Path) -> dict:
    """A JSON object from a file of the model folder, or a ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: {why_not_itself(path) or 'no such file'}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {why_not_itself(path) or f'not readable as JSON ({error})'}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
