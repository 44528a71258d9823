"""Find a model by its name on a hub: downloaded once, safetensors only, each large file checked against the hub's
digest."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from baton.cli.launch.object_store import download, url_of
from baton.cli.launch.placing.keeper import StartError
from baton.lines import one_line

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+?))?(:(?P<file>[\w./-]+\.gguf))?")
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
# Files for other programs, and the weights a second time in Mistral's own layout. Only chat templates are wanted from
# subfolders.
_NOT_WANTED = ["*/*.safetensors", "*/*.json", "consolidated*"]
_CHUNK_BYTES = 8 << 20


def name_on_hub(given: Path) -> str | None:
    """Return OWNER/NAME of a name on a hub; None for a path."""
    found = _NAME.fullmatch(str(given))
    return None if given.exists() or found is None else found["repo"]


def find_model(given: Path) -> Path:
    """Return the folder or file of a model: `given` itself, or what a URL or `OWNER/NAME[@REVISION][:FILE.gguf]` names
    (HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE as usual). Raises StartError, one line."""
    found = _NAME.fullmatch(str(given))
    if given.exists():
        return given
    if (url := url_of(given)) is not None:
        return download(url)
    if found is None:
        return given
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise StartError(
            f"{given} is no folder here; to download it from a hub: pip install huggingface-hub", 2
        ) from None
    from huggingface_hub import constants, errors

    wanted = [found["file"]] if found["file"] else _WANTED
    print(f"starting: {given}: looking it up at {constants.ENDPOINT}", file=sys.stderr, flush=True)
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                found["repo"],
                revision=found["revision"],
                allow_patterns=wanted,
                ignore_patterns=[] if found["file"] else _NOT_WANTED,
            )
        )
    except errors.LocalEntryNotFoundError:
        cache = Path(constants.HF_HUB_CACHE) / f"models--{found['repo'].replace('/', '--')}"
        raise StartError(
            f"{given}: is no folder here, {constants.ENDPOINT} cannot be reached, and nothing of it is in {cache}", 1
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        what = {"RevisionNotFoundError": "has no such revision"}.get(
            type(error).__name__, "has no such model, or not for you"
        )
        raise StartError(f"{given}: is no folder here, and {constants.ENDPOINT} {what}", 1) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise StartError(f"{given}: {one_line(error, 300)}", 1) from None
    model = folder / found["file"] if found["file"] else folder
    if not (model.is_file() if found["file"] else any(folder.glob("*.safetensors"))):
        raise StartError(f"{given}: has no {found['file'] or 'safetensors: other forms of weights are not read'}", 1)
    _verify(folder)
    return model


def _verify(folder: Path) -> None:
    """Compare each large file with its SHA-256, which is its name in the hub's cache. A file is compared once per
    download: a mark beside it says so. Raises StartError."""
    for path in folder.rglob("*"):
        blob = path.resolve()
        if not re.fullmatch("[0-9a-f]{64}", blob.name):
            continue  # a small file, whose name is not the SHA-256 of its bytes
        mark = blob.with_name(f"{blob.name}.verified")
        if mark.exists():
            continue
        print(f"starting: verifying {path.name}", file=sys.stderr, flush=True)
        if _sha256(blob) != blob.name:
            blob.unlink()
            raise StartError(f"{path.name}: what was downloaded is not what the hub names; it is removed, try again", 1)
        mark.touch()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
