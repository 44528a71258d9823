"""Adapters that operators load and unload while the worker runs; every gateway is told by another Hello."""

import asyncio
import logging
from pathlib import Path

from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.protocol import check_model_name
from baton.service.errors import FailedPrecondition, InvalidRequest, NotFound
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from baton.worker.session.sessions import Sessions

log = logging.getLogger(__name__)


class LiveAdapters:
    """Belongs to the event loop; one is read at a time, in a thread."""

    def __init__(self, engine: Engine, sessions: Sessions, hello: pb.Hello):
        """`hello`: what the worker says of itself; its list of adapters is kept true."""
        self._engine, self._sessions, self._hello = engine, sessions, hello
        self._turn = asyncio.Lock()

    async def load(self, name: str, path: str) -> bytes:
        """Return the identity of the adapter that the name stands for from now on. Raises InvalidRequest for one that cannot
        be read, FailedPrecondition where none may be."""
        try:
            check_model_name(name, "name")
        except ValueError as error:
            raise InvalidRequest("name", str(error).removeprefix("name ")) from None
        # A call that is given up ends no thread: what that has read is told all the same.
        read = await asyncio.shield(asyncio.create_task(self._read(name, self._below_root(path))))
        if isinstance(read, ModelError):
            raise InvalidRequest("path", str(read))
        return read

    def unload(self, name: str) -> None:
        """Take an adapter from new requests. Raises NotFound."""
        if not self._engine.adapters.remove(name):
            raise NotFound(f"there is no adapter {name[:80]!r} here", reason="ADAPTER_NOT_FOUND")
        self._tell()
        log.info("adapter unloaded %s", fields(name=name))

    async def _read(self, name: str, folder: Path) -> bytes | ModelError:
        """Read an adapter and tell of it. Return the error where it cannot be read, as nobody may be left to raise it to."""
        async with self._turn:
            try:
                identity = await asyncio.to_thread(self._engine.add_adapter, name, folder)
            except ModelError as error:
                return error
            self._tell()
        log.info("adapter loaded %s", fields(name=name, identity=identity.hex()))
        return identity

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
