"""Let ranks of other hosts join a worker. A rank says what it is, gets its assignment, reads its layers, says that it
is ready, and then computes.

rank     {"version", "build", "instructions"} ─► leader  {"refused": why}, or an Assignment
rank     Ready, or {"error": why}             ─► leader  then messages of parallel/pipeline.py, both ways
"""

import asyncio
import json
import logging
import queue
import time
from collections.abc import AsyncIterator

import grpc

import baton
from baton.addresses import host_of
from baton.engine.core.device import instruction_set
from baton.engine.kv.pool import CPU
from baton.engine.ranks.build_digest import build_digest
from baton.engine.ranks.process import Assignment
from baton.service.logs import fields
from baton.service.net import server as grpc_server
from baton.service.security.guard import Guard
from baton.service.security.tls import Tls
from baton.worker.ranks.stream import BROKEN, METHOD, SERVICE, JoinedStream

log = logging.getLogger(__name__)


class JoiningRank:
    """A rank of another host, as the engine uses it. Thread-safe."""

    still = "was not heard"
    # 5 s. After a link was down for 1.5 s, bytes arrive only after 3 s, since TCP doubles its pauses; the host may be
    # busy, too.
    missed_beats = 50

    def __init__(self, given: Assignment, stream: JoinedStream, address: str):
        self.given, self.stream = given, stream
        self._address, self._peer, self._ending = address, "", ""
        self._messages: queue.SimpleQueue[dict | str] = queue.SimpleQueue()

    @property
    def layers(self) -> range:
        assert self.given.stage is not None
        return self.given.stage.layers

    @property
    def where(self) -> str:
        """Return the address that it joined from."""
        return self._peer or "not here"

    def missing(self, seconds: float) -> str:
        """Describe a rank that has not been ready for `seconds`."""
        if self._peer:
            return f"at {self._peer} was not ready {seconds:.0f} s after the start"
        return f"has not joined {seconds:.0f} s after the start: `baton rank --leader {self._address} --model DIR` starts it"

    def core_wait_s(self) -> float:
        """Return 0: the load of its host is not known here."""
        return 0.0

    def next_message(self, deadline: float) -> dict | str | None:
        """Wait for its message after it has read its layers. Return a str that says why it ends, or None if there is no
        message in time."""
        try:
            return self._messages.get(timeout=max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def ended(self) -> str:
        """Return how it ended; "" while it is connected."""
        return self._ending

    def ask_to_end(self) -> None:
        self.stream.close()

    kill = ask_to_end

    def end(self, deadline: float) -> None:
        """Do nothing: it ends by itself when its call has ended."""

    def joins(self, peer: str) -> None:
        """Note that it has joined from `peer`."""
        self._peer = peer

    def deliver(self, message: dict) -> None:
        """Pass on its message that it is ready, or why it is not."""
        self._messages.put(message)

    def leaves(self) -> None:
        """Note that its call has ended."""
        self._ending = "has closed its connection"
        self._messages.put(f"at {self._peer} has closed its connection before it was ready")
        self.stream.close()


class RankListener:
    """Listen for ranks of other hosts. `place` may be called in any thread."""

    def __init__(self, address: str, tls: Tls | None, num_places: int):
        """Bind the port for `num_places` ranks. Raises ListenError."""
        self._guard = Guard(is_open=tls is None)
        self._server = grpc_server.make_server(interceptors=[self._guard])
        port = grpc_server.bind(self._server, address, tls and tls.server(require_certificate=True))
        self.address = f"{host_of(address)}:{port}"
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(self._join)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._loop = asyncio.get_running_loop()
        self._open: asyncio.Queue[JoiningRank] = asyncio.Queue()
        self._num_free, self._num_places = num_places, num_places

    async def start(self) -> None:
        """Let ranks join."""
        await grpc_server.start(self._server)

    async def stop(self) -> None:
        """End the calls of all ranks."""
        await self._server.stop(0)

    def place(self, given: Assignment) -> JoiningRank:
        """Give this assignment to the next rank that joins; return that rank."""

        async def open_place() -> JoiningRank:
            rank = JoiningRank(given, JoinedStream(), self.address)
            self._open.put_nowait(rank)
            return rank

        return asyncio.run_coroutine_threadsafe(open_place(), self._loop).result()

    async def _join(self, requests: AsyncIterator[bytes], context) -> None:
        try:
            hello = await anext(requests)
        except BROKEN:
            return
        if why := self._refusal(hello):
            log.warning("rank refused %s", fields(peer=context.peer(), why=why))
            await context.write(json.dumps({"refused": why}).encode())
            return
        self._num_free -= 1
        try:
            rank = await self._open.get()
        except asyncio.CancelledError:  # the rank has left
            self._num_free += 1
            raise
        rank.joins(context.peer())
        log.info(
            "rank joined %s", fields(peer=context.peer(), layers=str(rank.given.stage and rank.given.stage.layers))
        )
        try:
            await context.write(rank.given.line().encode())
            rank.deliver(json.loads(await anext(requests)))
            await rank.stream.run(lambda: anext(requests), context.write)
        except (*BROKEN, ValueError):  # it is gone, or its message is nonsense
            pass
        finally:
            rank.leaves()

    def _refusal(self, hello: bytes) -> str:
        """Return why a rank with this first message cannot join; "" if it can."""
        try:
            details = json.loads(hello)
            version, build, instructions = details["version"], details.get("build"), details["instructions"]
        except (ValueError, TypeError, KeyError):
            return "this is no rank's first message"
        if version != baton.__version__:
            return f"it runs baton {version}, the worker {baton.__version__}"
        if build != build_digest():
            return f"it runs another build of baton {version} than the worker: install the worker's on its host"
        if instructions != (own := instruction_set(CPU)):
            return f"it computes with {instructions}, the worker with {own}: their bits would differ"
        if not self._num_free:
            return f"the worker has all its {self._num_places} ranks of other hosts; is this one started twice?"
        return ""
