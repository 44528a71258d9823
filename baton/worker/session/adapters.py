"""Load and unload adapters while the worker runs. Gateways learn of them by another Hello, workers that start later by
records."""

import asyncio
import logging
from pathlib import Path

from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.model_files import below_root
from baton.protocol import check_model_name
from baton.service.errors import FailedPrecondition, InvalidRequest, NotFound
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from baton.worker.session.adapter_records import AdapterRecords
from baton.worker.session.sessions import Sessions

# Pauses after the start between checks for adapters that were loaded on other workers meanwhile. Together they are as
# long as an operator's calls that load an adapter on one worker after the other may take.
LOOKS_S = (1.0, 4.0, 15.0, 100.0)

log = logging.getLogger(__name__)


class LiveAdapters:
    """Load and unload adapters, one at a time. Called in the event loop."""

    def __init__(self, engine: Engine, sessions: Sessions, hello: pb.Hello):
        """Keep the list of adapters in `hello`, the worker's Hello, up to date."""
        self._engine, self._sessions, self._hello = engine, sessions, hello
        self._turn = asyncio.Lock()
        root = engine.config.adapter_root
        self._records = None if root is None else AdapterRecords(root, engine.model_name, engine.model_identity)
        self._applied_paths: dict[str, str] = {}  # by name, of records that were applied
        self._unloaded_by_record: set[str] = set()  # names unloaded because their record was removed, before any call

    async def restore(self) -> None:
        """Load the adapters that are recorded. One that cannot be read is logged and left out."""
        given = self._engine.adapters.listed()
        await self._apply_records()
        for name, identity in self._engine.adapters.listed().items():
            if given.get(name, identity) != identity:
                details = fields(name=name, path=self._applied_paths[name])
                log.warning("an adapter that was loaded before replaces that of --adapter %s", details)

    async def catch_up(self) -> None:
        """Apply what was loaded and unloaded on other workers while this one started and could not be called. Does not
        return."""
        for pause_s in LOOKS_S:
            await asyncio.sleep(pause_s)
            async with self._turn:
                await self._apply_records()
        await asyncio.get_running_loop().create_future()

    async def load(self, name: str, path: str) -> bytes:
        """Load an adapter; return its identity. `name` stands for it from now on. Raises InvalidRequest for an adapter
        that cannot be read, FailedPrecondition if none may be loaded."""
        # A cancelled call does not end the thread, so an adapter that it has read is announced all the same.
        folder = await asyncio.to_thread(self._checked, name, path)
        read = await asyncio.shield(asyncio.create_task(self._load(name, folder)))
        if isinstance(read, ModelError):
            raise InvalidRequest("path", str(read))
        return read

    async def unload(self, name: str) -> None:
        """Unload an adapter for new requests, and for workers that start later. Raises NotFound."""
        if not await asyncio.shield(asyncio.create_task(self._unload(name))):
            raise NotFound(f"there is no adapter {name[:80]!r} here", reason="ADAPTER_NOT_FOUND")

    async def _load(self, name: str, folder: Path) -> bytes | ModelError:
        """Load an adapter. Return the error instead of raising it, because the caller may be gone."""
        async with self._turn:
            try:
                identity = await self._add(name, folder)
            except ModelError as error:
                return error
            if (path := await asyncio.to_thread(self._write_record, name, folder)) is not None:
                self._applied_paths[name] = path
        return identity

    async def _unload(self, name: str) -> bool:
        async with self._turn:
            was_recorded = await asyncio.to_thread(self._remove_record, name)
            was_held = self._remove(name) or name in self._unloaded_by_record
            self._unloaded_by_record.discard(name)
        return was_held or was_recorded

    async def _apply_records(self) -> None:
        """Load adapters with new records, and unload those whose record was removed."""
        if (recorded := await asyncio.to_thread(self._read_records)) is None:
            return
        for name in self._applied_paths.keys() - recorded.keys():
            if self._records is not None and await asyncio.to_thread(self._records.is_gone, name):
                self._remove(name)
                self._unloaded_by_record.add(name)
        for name, path in recorded.items():
            if self._applied_paths.get(name) == path:
                continue
            try:
                await self._add(name, await asyncio.to_thread(self._checked, name, path))
                self._applied_paths[name] = path
            except Exception as error:  # such as a lack of memory: the worker goes on serving the others
                log.error("an adapter that was loaded before is not held %s", fields(name=name, path=path, error=error))

    def _remove(self, name: str) -> bool:
        """Remove an adapter from the engine; return whether it was loaded."""
        self._applied_paths.pop(name, None)
        if was_held := self._engine.adapters.remove(name):
            self._send_hello()
            log.info("adapter unloaded %s", fields(name=name))
        return was_held

    async def _add(self, name: str, folder: Path) -> bytes:
        """Load an adapter into the engine and tell gateways. Raises ModelError."""
        identity = await asyncio.to_thread(self._engine.add_adapter, name, folder)
        self._unloaded_by_record.discard(name)
        self._send_hello()
        log.info("adapter loaded %s", fields(name=name, identity=identity.hex()))
        return identity

    def _read_records(self) -> dict[str, str] | None:
        """Return recorded paths by name; None if the records cannot be read."""
        try:
            return {} if self._records is None else dict(self._records.read())
        except OSError as error:
            log.error("adapters that were loaded before are not held %s", fields(error=error))
            return None

    def _write_record(self, name: str, folder: Path) -> str | None:
        """Record the adapter; return the recorded path, or None if nothing could be written."""
        assert self._records is not None and self._engine.config.adapter_root is not None
        path = str(folder.relative_to(self._engine.config.adapter_root.resolve()))
        try:
            self._records.keep(name, path)
        except OSError as error:
            log.warning("workers that start later will not hold this adapter %s", fields(name=name, error=error))
            return None
        return path

    def _remove_record(self, name: str) -> bool:
        """Remove the record; return whether there was one, False if that cannot be seen."""
        try:
            return self._records is not None and self._records.forget(name)
        except OSError as error:
            log.warning("workers that start later may hold this adapter %s", fields(name=name, error=error))
            return False

    def _checked(self, name: str, path: str) -> Path:
        """Return the folder of an adapter that may be loaded under this name. Raises InvalidRequest,
        FailedPrecondition."""
        try:
            check_model_name(name, "name")
        except ValueError as error:
            raise InvalidRequest("name", str(error).removeprefix("name ")) from None
        return self._folder_of(path)

    def _folder_of(self, path: str) -> Path:
        if (root := self._engine.config.adapter_root) is None:
            raise FailedPrecondition("this worker has no --adapter-root: it loads no adapter while it runs")
        try:
            folder = below_root(root, path)
        except ValueError as error:
            raise InvalidRequest("path", f"is none: {error}") from None
        if folder is None:
            raise InvalidRequest("path", "is not below --adapter-root")
        return folder

    def _send_hello(self) -> None:
        del self._hello.adapters[:]
        for name, identity in self._engine.adapters.listed().items():
            self._hello.adapters.add(name=name, identity=identity)
        self._sessions.send_hello(self._hello)
