"""Download a model from an object store or web server once, in resumable pieces. Only safetensors are taken. Each file
is checked against its length, and against its tag or SHA256SUMS if these are digests of it. A new version replaces the
old one once it is complete."""

from __future__ import annotations

import datetime
import fcntl
import glob
import hashlib
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from baton import system
from baton.cli.launch.placing.keeper import StartError
from baton.lines import one_line

# A path has one slash where the URL had two.
_URL = re.compile(r"(?P<scheme>s3|gs|https?):/{1,2}(?P<rest>[^/].*?)/?")
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # in a subfolder
_WANTED = re.compile(rf"[^/]+\.(safetensors|json|jinja)|{re.escape(_TOOL_TEMPLATE)}")
_NOT_WANTED = re.compile(r"consolidated.*")  # the weights a second time, in Mistral's own layout
_INDEX, _WEIGHTS, _CONFIG, _SUMS = "model.safetensors.index.json", "model.safetensors", "config.json", "SHA256SUMS"
# Files besides the weights to ask for on a web server, which lists nothing.
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
           "chat_template.jinja", "chat_template.json", _TOOL_TEMPLATE, "quantize_config.json", "vocab.json",
           "added_tokens.json")  # fmt: skip
_PIECE_BYTES = 32 << 20
_DONE = ".complete"
_LOOK_S = 0.2  # between two checks whether another process has downloaded it


def url_of(given: Path) -> str | None:
    """Return the URL that was given as a path; None if the path is no URL."""
    found = _URL.fullmatch(str(given))
    return f"{found['scheme']}://{found['rest']}" if found else None


def download(url: str) -> Path:
    """Return the folder or .gguf file that `url` names, in the cache (XDG_CACHE_HOME). It is an s3://, gs:// or
    https:// URL; http:// is accepted on loopback only. Credentials and endpoints come from the variables of each
    cloud's own tools (AWS_*, GOOGLE_*). Raises StartError."""
    try:
        import obstore
    except ModuleNotFoundError:
        raise StartError(f"{url}: to download it: pip install obstore", 2) from None
    _refuse_plain_text(url)
    file = PurePosixPath(urlsplit(url).path).name if url.endswith(".gguf") else None
    folder_url = url.rpartition("/")[0] if file else url
    folder = (
        _cache() / hashlib.sha256(folder_url.encode()).hexdigest()[:16] / (PurePosixPath(folder_url).name or "model")
    )
    store = _Store(folder_url, file)
    print(f"starting: {url}: looking it up", file=sys.stderr, flush=True)
    try:
        with _alone_in(folder, url):
            _bring(store, folder, file)
    except FileNotFoundError:
        raise StartError(f"{url}: has no {file or 'model: config.json and safetensors are needed'}", 1) from None
    except (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError):
        raise StartError(f"{url}: its server refuses to give it: are its credentials set?", 1) from None
    except (obstore.exceptions.BaseError, OSError) as error:
        if not (folder / (file or _DONE)).is_file():
            raise StartError(
                f"{url}: cannot be downloaded, and is not whole in {folder}: {one_line(error, 200)}", 1
            ) from None
        print(
            f"starting: {url}: cannot be downloaded; {folder} has it ({one_line(error, 200)})",
            file=sys.stderr,
            flush=True,
        )
    return folder / file if file else folder


@contextmanager
def _alone_in(folder: Path, url: str) -> Iterator[None]:
    """Wait until no other process downloads into the folder, since both would append to the same files. File systems
    without locks cannot tell."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError:  # the folder cannot be written, by any process
        yield
        return
    with file:
        is_reported = False
        while _is_locked_elsewhere(file.fileno()):
            if not is_reported:
                print(f"starting: {url}: another process downloads it", file=sys.stderr, flush=True)
            is_reported = True
            time.sleep(_LOOK_S)
        yield


def _is_locked_elsewhere(fd: int) -> bool:
    """Try to lock a file until it is closed; return whether another process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    return False


def _bring(store: _Store, folder: Path, file: str | None) -> None:
    """Download the store's version completely, or leave the local one untouched. Raises StartError, OSError, and
    obstore's errors."""
    objects = store.look_up()
    parts = {each.name: _fetch(store, each, folder) for each in objects if not _is_here(each, folder)}
    if parts and store.look_up() != objects:
        for each in objects:
            if each.name in parts and each.e_tag is None:  # it may belong to either version
                parts[each.name].unlink()
        raise OSError("it was replaced while it was downloaded")
    _check_sums(store, objects, parts, folder)
    if file:
        _put_in_place(objects, parts, folder)
    elif parts or not (folder / _DONE).is_file() or _left_over(objects, folder):
        (folder / _DONE).unlink(missing_ok=True)  # until the end, the folder is a mixture of two versions
        _put_in_place(objects, parts, folder)
        for name in _left_over(objects, folder):  # they could be taken for weights of this version
            for each in (folder / name, _beside(name, folder, ".sha256"), _mark(name, folder)):
                each.unlink(missing_ok=True)
        (folder / _DONE).touch()


class _Object(NamedTuple):
    """An object in the store. `version` is its tag (ETag), or a replacement if the server names none. `e_tag` is the
    tag if the server can compare it, which excludes weak tags."""

    name: str
    size: int
    e_tag: str | None
    version: str


class _Store:
    """The objects below one URL, or one of them."""

    def __init__(self, url: str, file: str | None):
        from obstore import store

        self.url, self._file, self._lists = url, file, not url.startswith("http")
        retry: Any = {"max_retries": 3, "retry_timeout": datetime.timedelta(seconds=20)}
        client: Any = {"connect_timeout": "5s", "timeout": "120s", "allow_http": True}
        self._store: Any = store.from_url(url, client_options=client, retry_config=retry)

    def look_up(self) -> list[_Object]:
        """Return the objects that a model needs. Raises obstore's errors."""
        found = [(name, self.head(name)) for name in self._names()]
        return [_Object(name, each["size"], _strong(each.get("e_tag")), _version(each)) for name, each in found]

    def _names(self) -> Sequence[str]:
        if self._file:
            return [self._file]
        if self._lists:
            found = [each["path"] for page in self._store.list() for each in page]
            return [name for name in found if _WANTED.fullmatch(name) and not _NOT_WANTED.fullmatch(name)] or [_CONFIG]
        try:
            shards = sorted(set(json.loads(self.read(_INDEX))["weight_map"].values()))
        except FileNotFoundError:
            return [_CONFIG, _WEIGHTS, *self._present(_BESIDE)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartError(f"{self.url}/{_INDEX}: names no weights ({error})", 1) from None
        if not all(isinstance(name, str) and _WANTED.fullmatch(name) for name in shards):
            raise StartError(f"{self.url}/{_INDEX}: names what is no file of safetensors beside it", 1)
        return [_CONFIG, _INDEX, *shards, *self._present(_BESIDE)]

    def _present(self, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            try:
                self.head(name)
            except FileNotFoundError:
                continue
            yield name

    def head(self, name: str) -> dict[str, Any]:
        return self._store.head(name)

    def has_opaque_tag(self, name: str) -> bool:
        """Return whether an object's tag (ETag) is known not to be its MD5: S3's tag is not if the object is encrypted
        with a KMS key, which only S3's own answer tells."""
        import obstore

        if not self.url.startswith("s3:"):
            return False
        try:
            signed = obstore.sign(self._store, "HEAD", name, datetime.timedelta(minutes=1))
            request = urllib.request.Request(signed, method="HEAD")
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.headers.get("x-amz-server-side-encryption", "").startswith("aws:kms")
        except (obstore.exceptions.BaseError, OSError):  # without credentials no object under a KMS key can be read
            return False

    def read(self, name: str, begin: int = 0, length: int | None = None, e_tag: str | None = None) -> bytes:
        """Return an object, or a part of it, of the version `e_tag`."""
        options: dict[str, Any] = {} if length is None else {"range": (begin, begin + length)}
        if e_tag:
            options["if_match"] = e_tag
        return bytes(self._store.get(name, options=options).bytes())


def _strong(e_tag: str | None) -> str | None:
    return None if e_tag is None or e_tag.startswith("W/") else e_tag


def _version(found: dict[str, Any]) -> str:
    return found.get("e_tag") or f"{found['size']} bytes of {found.get('last_modified')}"


def _beside(name: str, folder: Path, ending: str) -> Path:
    """Return the path of the hidden file beside `name` with this ending."""
    path = folder / name
    return path.with_name(f".{path.name}{ending}")


def _mark(name: str, folder: Path) -> Path:
    """Return the path of the file that holds the version of the local copy."""
    return _beside(name, folder, ".etag")


def _is_here(found: _Object, folder: Path) -> bool:
    mark = _mark(found.name, folder)
    return (folder / found.name).is_file() and mark.is_file() and mark.read_text() == found.version


def _fetch(store: _Store, found: _Object, folder: Path) -> Path:
    """Download one file beside its final place, resuming an earlier try, and return its path. Raises StartError."""
    name, size = found.name, found.size
    part = _beside(name, folder, f".{hashlib.sha256(found.version.encode()).hexdigest()[:8]}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    for each in part.parent.glob(f".{glob.escape(PurePosixPath(name).name)}.????????.part"):
        if each != part:  # of a version that the store no longer has
            each.unlink()
    with part.open("ab") as file:
        while (begin := file.tell()) < size:
            progress = f"starting: {name}: {begin >> 20} of {size >> 20} MiB"
            if size > _PIECE_BYTES:
                print(progress, file=sys.stderr, flush=True)
            piece = store.read(name, begin, min(_PIECE_BYTES, size - begin), found.e_tag)
            if not piece:
                break
            file.write(piece)
    _check(store, part, found)
    return part


def _put_in_place(objects: Sequence[_Object], parts: Mapping[str, Path], folder: Path) -> None:
    for found in objects:
        if found.name in parts:
            parts[found.name].replace(folder / found.name)
            _mark(found.name, folder).write_text(found.version)


def _left_over(objects: Sequence[_Object], folder: Path) -> list[str]:
    """Return the downloaded model files that the store no longer has."""
    marks = (path.relative_to(folder) for path in folder.rglob(".*.etag"))
    brought = {str(mark.with_name(mark.name[1:].removesuffix(".etag"))) for mark in marks}
    return [name for name in brought - {each.name for each in objects} if _WANTED.fullmatch(name)]


def _check(store: _Store, path: Path, found: _Object) -> None:
    """Compare a file with its length, and with its tag if that is an MD5, as it is for objects stored in one piece.
    Raises StartError."""
    is_whole = path.stat().st_size == found.size
    if is_whole and (_matches_md5(path, found.version) or store.has_opaque_tag(found.name)):
        return
    path.unlink()
    raise StartError(f"{found.name}: what was downloaded is not what the store names; it is removed, try again", 1)


def _matches_md5(path: Path, e_tag: str) -> bool:
    """Return whether a file has this MD5; True if the tag is no MD5."""
    digest = e_tag.strip('"')
    return re.fullmatch("[0-9a-f]{32}", digest) is None or _digest(path, "md5") == digest


def _check_sums(store: _Store, objects: Sequence[_Object], parts: Mapping[str, Path], folder: Path) -> None:
    """Compare downloaded and existing files with the repository's SHA256SUMS, if it has one; existing files are
    compared once per version. Raises StartError."""
    try:
        sums = store.read(_SUMS).decode(errors="replace")
    except FileNotFoundError:
        return
    versions = {each.name: each.version for each in objects}
    for digest, name in re.findall(r"^([0-9a-f]{64}) [ *](.+)$", sums, re.MULTILINE):
        if name not in versions:
            continue
        path, mark = parts.get(name, folder / name), _beside(name, folder, ".sha256")
        entry = f"{digest} {versions[name]}"
        if name not in parts and mark.is_file() and mark.read_text() == entry:
            continue
        print(f"starting: verifying {name}", file=sys.stderr, flush=True)
        if _digest(path, "sha256") != digest:
            if name not in parts:
                (folder / _DONE).unlink(missing_ok=True)
            path.unlink()
            raise StartError(f"{name}: is not what {_SUMS} names; it is removed, try again", 1)
        mark.write_text(entry)


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _refuse_plain_text(url: str) -> None:
    host = urlsplit(url).hostname or ""
    if url.startswith("http://") and not (host in ("localhost", "::1") or host.startswith("127.")):
        raise StartError(f"{url}: anyone on the way could change it; use https://", 2)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or system.with_home("~/.cache")
    return Path(base) / "baton" / "models"
