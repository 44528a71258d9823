"""Adapters that operators load and unload while the worker runs; every gateway is told by another Hello, and
records say to workers that start later which there are."""

import asyncio
import logging
from pathlib import Path

from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.protocol import check_model_name
from baton.service.errors import FailedPrecondition, InvalidRequest, NotFound
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from baton.worker.session.adapter_records import AdapterRecords
from baton.worker.session.sessions import Sessions

log = logging.getLogger(__name__)


class LiveAdapters:
    """Belongs to the event loop; one is read or taken away at a time."""

    def __init__(self, engine: Engine, sessions: Sessions, hello: pb.Hello):
        """`hello`: what the worker says of itself; its list of adapters is kept true."""
        self._engine, self._sessions, self._hello = engine, sessions, hello
        self._turn = asyncio.Lock()
        root = engine.config.adapter_root
        self._records = None if root is None else AdapterRecords(root, engine.model_name, engine.model_identity)

    async def restore(self) -> None:
        """Read those that were loaded before this worker started, and not unloaded. One that cannot be read is logged, and
        not held."""
        given = self._engine.adapters.listed()
        for name, path in await asyncio.to_thread(self._recorded):
            try:
                identity = await self._read(name, await asyncio.to_thread(self._checked, name, path))
            except Exception as error:  # for want of memory, say: the worker starts, and serves the others
                log.error("an adapter that was loaded before is not held %s", fields(name=name, path=path, error=error))
                continue
            if given.get(name, identity) != identity:
                log.warning(
                    "an adapter that was loaded before replaces that of --adapter %s", fields(name=name, path=path)
                )

    async def load(self, name: str, path: str) -> bytes:
        """Return the identity of the adapter that the name stands for from now on. Raises InvalidRequest for one that cannot
        be read, FailedPrecondition where none may be."""
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
                identity = await self._read(name, folder)
            except ModelError as error:
                return error
            await asyncio.to_thread(self._record, name, folder)
        return identity

    async def _unload(self, name: str) -> bool:
        async with self._turn:
            was_recorded = await asyncio.to_thread(self._forget, name)
            if was_held := self._engine.adapters.remove(name):
                self._tell()
                log.info("adapter unloaded %s", fields(name=name))
        return was_held or was_recorded

    async def _read(self, name: str, folder: Path) -> bytes:
        """Read an adapter and tell of it. Raises ModelError."""
        identity = await asyncio.to_thread(self._engine.add_adapter, name, folder)
        self._tell()
        log.info("adapter loaded %s", fields(name=name, identity=identity.hex()))
        return identity

    def _recorded(self) -> list[tuple[str, str]]:
        try:
            return [] if self._records is None else self._records.read()
        except OSError as error:
            log.error("adapters that were loaded before are not held %s", fields(error=error))
            return []

    def _record(self, name: str, folder: Path) -> None:
        assert self._records is not None and self._engine.config.adapter_root is not None
        try:
            self._records.keep(name, str(folder.relative_to(self._engine.config.adapter_root.resolve())))
        except OSError as error:
            log.warning("workers that start later will not hold this adapter %s", fields(name=name, error=error))

    def _forget(self, name: str) -> bool:
        """Return whether there was a record of it, as far as can be seen."""
        try:
            return self._records is not None and self._records.forget(name)
        except OSError as error:
            log.warning("workers that start later may hold this adapter %s", fields(name=name, error=error))
            return False

    def _checked(self, name: str, path: str) -> Path:
        """Return the folder of an adapter that may be loaded by this name. Raises InvalidRequest, FailedPrecondition."""
        try:
            check_model_name(name, "name")
        except ValueError as error:
            raise InvalidRequest("name", str(error).removeprefix("name ")) from None
        return self._below_root(path)

    def _below_root(self, path: str) -> Path:
        if (root := self._engine.config.adapter_root) is None:
            raise FailedPrecondition("this worker has no --adapter-root: it loads no adapter while it runs")
        try:
            folder = (root / path).resolve()
        except (ValueError, RuntimeError) as error:  # NUL, links in a circle
            raise InvalidRequest("path", f"is none: {error}") from None
        if not path or not folder.is_relative_to(root.resolve()):
            raise InvalidRequest("path", "is not below --adapter-root")
        return folder

    def _tell(self) -> None:
        del self._hello.adapters[:]
        for name, identity in self._engine.adapters.listed().items():
            self._hello.adapters.add(name=name, identity=identity)
        self._sessions.send_hello(self._hello)
