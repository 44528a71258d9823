"""Find the model that a request names among those that are served; add, replace and remove models at run time."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from baton.model_files import below_root
from baton.protocol import check_model_name
from baton.service.errors import BatonError, FailedPrecondition, InvalidRequest
from baton.service.logs import fields
from baton.service.settings import SettingsError
from gateway.catalog.model_version import ModelVersion
from gateway.config.served_model import ServedModel
from gateway.request.validation import model_not_served_error, unknown_model_error

MAX_MODELS = 64  # names of models; each one is a label of every metric
_IDENTITY = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class VersionUse:
    """Count a request on a model version while the context is entered; a replaced version is dropped with its last
    request.

    It is not made from a generator, which would add 1 KiB to each open stream."""

    __slots__ = ("_catalog", "_version")

    def __init__(self, catalog: "Catalog", version: ModelVersion):
        self._catalog, self._version = catalog, version

    def __enter__(self) -> ModelVersion:
        self._version.num_running += 1
        return self._version

    def __exit__(self, *exc) -> None:
        self._version.num_running -= 1
        self._catalog.note_change()


class Catalog:
    """The models that are served, by name. Belongs to the event loop.

    A name stands for the oldest of its versions that is not retired. A newer version takes over once workers serve it,
    and the one before is dropped with its last request."""

    def __init__(
        self,
        make: Callable[[str, Path, bytes], Awaitable[ModelVersion]],
        drop: Callable[[ModelVersion], None],
        root: Path | None,
    ):
        """`make(name, path, identity)` reads a model's folder, begins to serve it, and may raise SettingsError. `drop`
        releases a version. `root`: the folder below which operators may add models; None: they may not."""
        self.versions: list[ModelVersion] = []  # the oldest first
        self._make, self._drop, self._root = make, drop, root
        self._turn = asyncio.Lock()

    @property
    def current(self) -> list[ModelVersion]:
        """Return the version that each name stands for, in the order in which the names came."""
        found: dict[str, ModelVersion] = {}
        for version in self.versions:
            if not version.fleet.is_retired:
                found.setdefault(version.name, version)
        return list(found.values())

    @property
    def only_name(self) -> str:
        """Return the name of the model if only one is served, otherwise an empty string."""
        names = {version.name for version in self.current}
        return names.pop() if len(names) == 1 else ""

    def find(self, asked: str, tenant: str) -> ModelVersion:
        """Return the model that a request names.

        A request names it by MODEL, MODEL:ADAPTER or the name of an adapter that one model has, and needs no name if
        only one model is served. Raises NotFound, Unavailable if that is not known yet, and InvalidRequest if the name
        could mean several models."""
        current = self.current
        for version in current:
            if version.name == asked or len(current) == 1:
                return version  # if it is the only one, validation checks later what the request names
        models = [version.seen_by(tenant) for version in current]
        found = [version for version, model in zip(current, models, strict=True) if model.find(asked) is not None]
        if len(found) == 1:
            return found[0]
        if not found:
            raise unknown_model_error(asked, models)
        raise InvalidRequest("model", _ambiguous(asked, models))

    def find_or_first(self, asked: str, tenant: str) -> ModelVersion:
        """Return the model that a request names, or any model if the request will be refused for its name."""
        try:
            return self.find(asked, tenant)
        except BatonError:
            return self.current[0]

    def using(self, version: ModelVersion) -> "VersionUse":
        """Return a context manager that counts a request on `version`."""
        return VersionUse(self, version)

    def note_change(self) -> None:
        """Let newer versions that can serve take over, and drop retired versions without requests."""
        if len(self.versions) == len({version.name for version in self.versions if not version.fleet.is_retired}):
            return  # nothing is being replaced; this check is short as it runs after every report of every worker
        newer: set[str] = set()
        for version in reversed(self.versions):
            if version.name in newer and not version.fleet.is_retired:
                version.fleet.is_retired = True
                log.info("model replaced %s", fields(model=version.name, running=version.num_running))
            if not version.fleet.is_retired and version.fleet.not_ready() is None:
                newer.add(version.name)
        for version in [each for each in self.versions if each.fleet.is_retired and not each.num_running]:
            self.versions.remove(version)
            self._drop(version)
            log.info("model dropped %s", fields(model=version.name, identity=version.fleet.last_identity.hex() or "-"))

    # ---- called by operators ----

    async def add(self, name: str, path: str, identity: str) -> None:
        """Serve a model from a folder: now or, if another model has the name, as soon as a worker serves it.

        `identity` is what its workers must have, in hex, or empty. Raises BatonError; then nothing has changed."""
        try:
            check_model_name(name, "name")
        except ValueError as error:
            raise InvalidRequest("name", str(error)) from None
        if identity and not _IDENTITY.fullmatch(identity):
            raise InvalidRequest("identity", "is not 64 hex digits, as a worker's ready line has them")
        required_identity = bytes.fromhex(identity)
        folder = self._folder_of(path)
        async with self._turn:
            self._check(name, required_identity)
            try:
                self.versions.append(await self._make(name, folder, required_identity))
            except SettingsError as error:
                raise InvalidRequest("path", str(error)) from None
        log.info("model added %s", fields(model=name, path=folder, identity=identity or "-"))

    def remove(self, name: str) -> int:
        """Give a model no new requests; return how many of its requests still run. Raises NotFound and
        FailedPrecondition."""
        named = [version for version in self.versions if version.name == name and not version.fleet.is_retired]
        if not named:
            raise model_not_served_error(name, [version.seen_by() for version in self.current])
        if self.only_name:
            raise FailedPrecondition(f"{name} is the only model that is served: add another before")
        for version in named:
            version.fleet.is_retired = True
        num_running = sum(version.num_running for version in named)
        log.info("model removed %s", fields(model=name, running=num_running))
        self.note_change()
        return num_running

    def _check(self, name: str, identity: bytes) -> None:
        if identity and (taken := next((each for each in self.versions if each.fleet.has(identity)), None)):
            raise InvalidRequest("identity", f"is served already, as {taken.name}")
        names = {version.name for version in self.versions}
        if name not in names and len(names) >= MAX_MODELS:
            raise FailedPrecondition(f"{MAX_MODELS} models are served already")
        if any(name in version.fleet.model.adapters for version in self.current):
            raise InvalidRequest("name", f"{name} is an adapter's")

    def _folder_of(self, path: str) -> Path:
        if (root := self._root) is None:
            raise FailedPrecondition("this gateway has no --model-root: it adds no model while it runs")
        try:
            found = below_root(root, path)
        except ValueError:
            raise InvalidRequest("path", "names no folder") from None
        if found is None:
            raise InvalidRequest("path", "is not below --model-root")
        if not found.is_dir():
            raise InvalidRequest("path", "names no folder")
        return found


def _ambiguous(asked: str, models: Sequence[ServedModel]) -> str:
    if not asked:
        return f"is needed, one of: {', '.join(model.name for model in models)}"
    full = ", ".join(f"{model.name}:{asked}" for model in models if asked in model.adapters)
    return f"{asked[:80]!r} is an adapter of several models, say one of: {full}"
