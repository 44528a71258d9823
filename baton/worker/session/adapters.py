"""Adapters that operators load and unload while the worker runs; every gateway is told by another Hello, and
records say to workers that start later which there are."""

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

# After the start, between looks at what was loaded elsewhere meanwhile: in all as long as the calls of one who loads an
# adapter on each worker, one after the other, may take.
LOOKS_S = (1.0, 4.0, 15.0, 100.0)

log = logging.getLogger(__name__)


class LiveAdapters:
    """Belongs to the event loop; one is read or taken away at a time."""

    def __init__(self, engine: Engine, sessions: Sessions, hello: pb.Hello):
        """`hello`: what the worker says of itself; its list of adapters is kept true."""
        self._engine, self._sessions, self._hello = engine, sessions, hello
        self._turn = asyncio.Lock()
        root = engine.config.adapter_root
        self._records = None if root is None else AdapterRecords(root, engine.model_name, engine.model_identity)
        self._applied_paths: dict[str, str] = {}  # by name, of records that were followed
        self._unloaded_by_record: set[str] = set()  # whose unloading was followed before this worker was asked for it

    async def restore(self) -> None:
        """Read those that were loaded before this worker started, and not unloaded. One that cannot be read is logged,
        and not held."""
        given = self._engine.adapters.listed()
        await self._apply_records()
        for name, identity in self._engine.adapters.listed().items():
            if given.get(name, identity) != identity:
                details = fields(name=name, path=self._applied_paths[name])
                log.warning("an adapter that was loaded before replaces that of --adapter %s", details)

    async def catch_up(self) -> None:
        """Follow what was loaded and unloaded on other workers while this one started, and no call could reach it. Does
        not end."""
        for pause_s in LOOKS_S:
            await asyncio.sleep(pause_s)
            async with self._turn:
                await self._apply_records()
        await asyncio.get_running_loop().create_future()

    async def load(self, name: str, path: str) -> bytes:
        """Return the identity of the adapter that the name stands for from now on. Raises InvalidRequest for one that
        cannot be read, FailedPrecondition where none may be."""
        # A call that is given up ends no thread: what that has read is told all the same.
        folder = await asyncio.to_thread(self._checked, name, path)
        read = await asyncio.shield(asyncio.create_task(self._load(name, folder)))
        if isinstance(read, ModelError):
            raise InvalidRequest("path", str(read))
        return read

    async def unload(self, name: str) -> None:
        """Take an adapter from new requests, and from workers that start later. Raises NotFound."""
        if not await asyncio.shield(asyncio.create_task(self._unload(name))):
            raise NotFound(f"there is no adapter {name[:80]!r} here", reason="ADAPTER_NOT_FOUND")

    async def _load(self, name: str, folder: Path) -> bytes | ModelError:
        """Return the error where it cannot be read, as nobody may be left to raise it to."""
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
        """Add what is recorded and was not, and remove what was and is no more."""
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
            except Exception as error:  # for want of memory, say: the worker serves the others
                log.error("an adapter that was loaded before is not held %s", fields(name=name, path=path, error=error))

    def _remove(self, name: str) -> bool:
        """Return whether it was held."""
        self._applied_paths.pop(name, None)
        if was_held := self._engine.adapters.remove(name):
            self._send_hello()
            log.info("adapter unloaded %s", fields(name=name))
        return was_held

    async def _add(self, name: str, folder: Path) -> bytes:
        """Read an adapter and tell gateways of it. Raises ModelError."""
        identity = await asyncio.to_thread(self._engine.add_adapter, name, folder)
        self._unloaded_by_record.discard(name)
        self._send_hello()
        log.info("adapter loaded %s", fields(name=name, identity=identity.hex()))
        return identity

    def _read_records(self) -> dict[str, str] | None:
        """Return paths by name; None: they cannot be looked at."""
        try:
            return {} if self._records is None else dict(self._records.read())
        except OSError as error:
            log.error("adapters that were loaded before are not held %s", fields(error=error))
            return None

    def _write_record(self, name: str, folder: Path) -> str | None:
        """Return the path that is recorded; None: none could be."""
        assert self._records is not None and self._engine.config.adapter_root is not None
        path = str(folder.relative_to(self._engine.config.adapter_root.resolve()))
        try:
            self._records.keep(name, path)
        except OSError as error:
            log.warning("workers that start later will not hold this adapter %s", fields(name=name, error=error))
            return None
        return path

    def _remove_record(self, name: str) -> bool:
        """Return whether there was a record of it, as far as can be seen."""
        try:
            return self._records is not None and self._records.forget(name)
        except OSError as error:
            log.warning("workers that start later may hold this adapter %s", fields(name=name, error=error))
            return False

    def _checked(self, name: str, path: str) -> Path:
        """Return the folder of an adapter that may be loaded by this name. Raises InvalidRequest,
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
