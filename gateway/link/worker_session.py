"""Keep a session stream with one worker: reconnect with growing pauses, and end a stream on which nothing arrives."""

import asyncio
import logging
import random
from functools import partial
from typing import Protocol

import grpc

from baton.protocol import PROTOCOL
from baton.service.clock import now
from baton.service.logs import fields
from baton.service.net.client import connect, open_channel
from baton.service.net.in_process import InProcessChannel, channel_to
from baton.service.security.access import Access
from baton.service.security.tls import WORKER_NAME
from baton.tasks import cancel_call, is_cancelled
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from gateway.link.session_writer import start_writer

SILENCE_S = 2.25  # a session is dead after a longer silence, since reports of load arrive four times a second
_HELLO_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
# While a worker may be starting, that is for 30 s, pauses stay shorter: requests wait for it.
_STARTING_S, _STARTING_PAUSE_S = 30.0, 0.4

log = logging.getLogger(__name__)


class SessionOwner(Protocol):
    """The owner of a session, which handles its events: a WorkerLink."""

    hello: pb.Hello | None  # the worker's Hello in the session that is up

    def accept_hello(self, hello: pb.Hello) -> str | None:
        """Accept or refuse the worker by its first Hello. Return why it is refused, or None."""
        ...

    def join(self, hello: pb.Hello) -> None:
        """Begin a session with a worker that was accepted."""

    def on_event(self, event: pb.Event) -> None:
        """Handle one event of the session."""

    def lose(self, reason: str) -> None:
        """End the session, or a failed attempt to begin one."""

    def note_failure(self, what: str) -> None:
        """Count a failure of the worker."""

    def may_come(self, within_s: float) -> bool:
        """Return whether the worker has been away for less than `within_s`, so that it may be starting."""
        ...


class WorkerSession:
    """Keep one session after the other with the worker at an address; `owner` handles its events."""

    def __init__(self, address: str, instance: bytes, access: Access, owner: SessionOwner):
        self._address, self._instance, self._access, self._owner = address, instance, access, owner
        self._outbox: asyncio.Queue[pb.Command] | None = None
        self._silence: asyncio.Timeout | None = None  # ends the session that is up
        self._ended_for = ""  # why this gateway ended the session
        self._was_heard, self._silent_s = False, 0.0

    def send(self, command: pb.Command) -> None:
        """Queue a command. Without a session it is dropped, since its leg has got Lost."""
        if self._outbox is not None:
            self._outbox.put_nowait(command)

    def hang_up(self, why: str) -> None:
        """End the session without ending its legs: the worker parks its sequences until a gateway attaches."""
        self._outbox, self._ended_for = None, why
        self._end()

    def check_silence(self, elapsed_s: float) -> None:
        """End the session if nothing has arrived for SILENCE_S. Call it regularly.

        `elapsed_s` is the time for which this process has run since the last call."""
        if self._was_heard:
            self._was_heard, self._silent_s = False, 0.0
        else:
            self._silent_s += elapsed_s
            if self._silent_s > SILENCE_S:
                self._end()

    def _end(self) -> None:
        silence, self._silence = self._silence, None  # one that has fired cannot be told again
        if silence is not None:
            silence.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Connect and serve a session, then pause and connect again, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        if self._owner.hello is not None:
            self._owner.lose("its session has failed")  # this task had failed, and was restarted
        while True:
            connected_at = now()
            try:
                own = channel_to(self._address)  # a channel within this process, if the worker runs in it
                async with own or open_channel(self._address, self._access, WORKER_NAME) as channel:
                    failure = None if own else await _connection_failure(channel)
                    reason = failure or await self._serve(channel)
            except OSError as error:  # a file of a certificate is missing at present
                reason = f"{error.filename}: {error.strerror}"
            was_up = self._owner.hello is not None
            self._owner.lose(reason)
            if was_up and now() - connected_at > pause_s:  # a worker may die of each session: no short pause for it
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            longest_s = _STARTING_PAUSE_S if self._owner.may_come(_STARTING_S) else _LONGEST_PAUSE_S
            pause_s = min(2 * pause_s, longest_s)

    async def _serve(self, channel: grpc.aio.Channel | InProcessChannel) -> str:
        """Serve one stream until it ends; return why it ended."""
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        outbox = asyncio.Queue()
        hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, instance=self._instance)
        outbox.put_nowait(pb.Command(hello=hello))
        self._ended_for = ""
        writer = start_writer(call, outbox, self._address, partial(self.hang_up, "nothing can be sent to it"))
        try:
            return await self._read(call, outbox)
        except TimeoutError:
            return self._ended_for or "no word from it"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._owner.note_failure("it sent more than a message may have")
            return _described(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "its stream was cancelled"
        except Exception as error:  # whatever the worker sent, the next session may go well
            log.exception("malformed event %s", fields(address=self._address))
            self._owner.note_failure("it sent a malformed event")
            return f"it sent a malformed event: {error}"
        finally:
            self._outbox = None
            writer.cancel()
            cancel_call(call)
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, call, outbox: asyncio.Queue) -> str:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("kind") != "hello":
            return "it did not say Hello"
        if reason := self._owner.accept_hello(first.hello):
            return reason
        self._outbox, self._ended_for, self._was_heard = outbox, "", True
        self._owner.join(first.hello)
        try:
            async with asyncio.timeout(None) as self._silence:
                while (event := await call.read()) is not grpc.aio.EOF:
                    self._was_heard = True
                    self._owner.on_event(event)
        finally:
            self._silence = None
        return "it closed the session"


async def _connection_failure(channel: grpc.aio.Channel) -> str | None:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            await connect(channel)
    except TimeoutError:
        return "no word from it"
    except grpc.aio.AioRpcError as error:
        return _described(error)
    return None


def _described(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
