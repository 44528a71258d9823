"""Serve one bidirectional stream per gateway: Hello both ways, then commands in and events out. When it is lost,
decoding legs are parked. A new stream of the same gateway replaces the old one."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator

from baton.protocol import KEEPER_VARIABLE, PROTOCOL, ROLES
from baton.service.errors import FailedPrecondition, InvalidRequest
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.session.adapters import LiveAdapters
from baton.worker.session.drain import Drain
from baton.worker.session.leg_dispatcher import LegDispatcher
from baton.worker.session.sessions import Sessions
from baton.worker.wire.outbox import Outbox

HELLO_TIMEOUT_S = 10.0
MAX_GRACE_S = 3600.0

log = logging.getLogger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answer gateways, and operators' commands."""

    def __init__(
        self, dispatcher: LegDispatcher, sessions: Sessions, drain: Drain, adapters: LiveAdapters, hello: pb.Hello
    ):
        """Serve with `hello`, the worker's Hello."""
        self._adapters = adapters
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._drain = drain
        self._hello = hello

    async def Describe(self, request: pb.DescribeRequest, context) -> pb.Hello:
        described = pb.Hello()
        described.CopyFrom(self._hello)
        described.wall_time_ns = time.time_ns()
        return described

    async def Drain(self, request: pb.DrainRequest, context) -> pb.DrainResponse:
        """Begin to drain. A second call with the same next role returns how far it is, and may shorten the grace.
        Raises InvalidRequest, FailedPrecondition."""
        if request.next_role not in ("", *ROLES):
            raise InvalidRequest("next_role", "is unknown: prefill or decode, or empty to end")
        if request.stay_away and request.next_role:
            raise InvalidRequest("stay_away", "and next_role exclude each other")
        if not 0 <= request.grace_s < MAX_GRACE_S:
            raise InvalidRequest("grace_s", f"must be 0 (the worker's own) or below {MAX_GRACE_S:g}")
        num_sequences = self._drain.ask(request.next_role, request.grace_s, request.stay_away)
        keeper = os.environ.get(KEEPER_VARIABLE, "")
        return pb.DrainResponse(num_sequences=num_sequences, role=self._hello.roles[0], keeper=keeper)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context) -> pb.LoadAdapterResponse:
        """Load an adapter for new requests. Raises BatonError."""
        return pb.LoadAdapterResponse(identity=await self._adapters.load(request.name, request.path))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context) -> pb.UnloadAdapterResponse:
        """Unload an adapter for new requests. Raises BatonError."""
        await self._adapters.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def Session(self, commands: AsyncIterator[pb.Command], context) -> None:
        """Serve one session until the gateway hangs up or the worker closes it. Raises FailedPrecondition."""
        hello = await self._greet(commands)
        outbox = Outbox(context.write, self._dispatcher.on_read, before_endings=self._sessions.send_block_events)
        if (last := self._sessions.open(hello.instance, outbox)) is not None:
            self._dispatcher.on_stream_lost(last)
            last.close()
        outbox.reply(pb.Event(hello=self._hello))  # only now, so that no later change is missed
        log.info("session opened %s", fields(session=hello.instance.hex()[:8], peer=context.peer()))
        reader = asyncio.create_task(self._read(outbox, commands), name="session reader")
        writer = asyncio.create_task(outbox.run(), name="session writer")
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sessions.close(hello.instance, outbox)
            self._dispatcher.on_stream_lost(outbox)
            outbox.close()
            reader.cancel()
            writer.cancel()
            ends = await asyncio.gather(reader, writer, return_exceptions=True)
            why = next((_words(end) for end in ends if isinstance(end, Exception)), "hung up")
            log.info("session closed %s", fields(session=hello.instance.hex()[:8], why=why))

    async def _greet(self, commands: AsyncIterator[pb.Command]) -> pb.Hello:
        """Return the gateway's Hello. Raises FailedPrecondition if the two cannot talk."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                command = await anext(commands, None)
        except TimeoutError:
            command = None
        if command is None or not command.HasField("hello"):
            raise FailedPrecondition("the first command of a session must be Hello")
        hello = command.hello
        if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
            spoken = f"{hello.protocol_min} to {hello.protocol_max}"
            raise FailedPrecondition(
                f"this worker speaks protocol {PROTOCOL}, the gateway {spoken}: upgrade the older of the two",
                reason="PROTOCOL_MISMATCH",
            )
        return hello

    async def _read(self, outbox: Outbox, commands: AsyncIterator[pb.Command]) -> None:
        async for command in commands:
            kind = command.WhichOneof("kind")
            if kind == "subscribe":
                self._sessions.subscribe(outbox, self._hello.epoch)
            elif kind == "beat":
                outbox.beat(command.beat)
            elif kind == "hello" or kind is None:
                log.warning("session: a command that has no place here was ignored %s", fields(kind=kind))
            else:
                self._dispatcher.dispatch(outbox, command)
            await outbox.room()


def _words(error: Exception) -> str:
    """Describe why a session ended. Errors of writing to a peer that has left name only gRPC's own objects."""
    return "hung up" if type(error).__module__.startswith("grpc") else f"{type(error).__name__}: {error}"
