"""Calls to a service of this process: the messages themselves change hands, without a socket and without bytes.

A channel has the face of grpc.aio's as far as a generated stub needs it, for methods that stream both ways.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import grpc

_MAX_UNREAD = 16  # messages of one direction that wait to be read; then a write waits
_END = object()
_channels: dict[str, "InProcessChannel"] = {}

log = logging.getLogger(__name__)


class InProcessChannel:
    """Reaches a servicer once `serve` has said which. Belongs to one event loop, on both sides."""

    def __init__(self) -> None:
        self._servicer: object | None = None

    def serve(self, servicer: object) -> None:
        """Let calls that come from now on reach `servicer`, which has methods as a generated one."""
        self._servicer = servicer

    async def __aenter__(self) -> "InProcessChannel":
        return self

    async def __aexit__(self, *exc) -> None:
        """Do nothing: calls end by themselves, and the channel is another caller's too."""

    def stream_stream(self, method: str, *unused, **options) -> Callable[[], "InProcessCall"]:
        """Return what calls `method`, "/package.Service/Name"."""
        return lambda: InProcessCall(partial(self._handler, method.rpartition("/")[2]))

    def unary_unary(self, method: str, *unused, **options) -> Callable[..., NoReturn]:
        """Return what refuses: such calls are operators', who are other processes."""
        return partial(_refuse, method)

    def _handler(self, name: str) -> Callable[..., Any]:
        """Raises AioRpcError where nothing serves yet."""
        if self._servicer is None:
            raise _error(grpc.StatusCode.UNAVAILABLE, "it has not started yet")
        return getattr(self._servicer, name)


@contextmanager
def reachable_as(address: str) -> Iterator[InProcessChannel]:
    """Within the block `channel_to(address)` reaches a servicer of this process."""
    _channels[address] = channel = InProcessChannel()
    try:
        yield channel
    finally:
        del _channels[address]


def channel_to(address: str) -> InProcessChannel | None:
    """Return the channel to what this process serves at `address`; None: another process does."""
    return _channels.get(address)


class InProcessCall:
    """The caller's side of one call, as grpc.aio.StreamStreamCall has it."""

    def __init__(self, find: Callable[[], Callable[..., Any]]):
        """`find()` returns the servicer's method, or raises AioRpcError, which the first read then does."""
        self._commands: asyncio.Queue[Any] = asyncio.Queue(_MAX_UNREAD)
        self._answers: asyncio.Queue[Any] = asyncio.Queue()  # bounded by `_answer`, and `_END` fits in any case
        self._has_room = asyncio.Event()
        self._handling = asyncio.create_task(self._handle(find), name="call within the process")
        self._handling.add_done_callback(self._end)

    async def write(self, message: Any) -> None:
        """Hand over a message, which nobody may change from here on. Waits while too many are unread. Raises
        asyncio.InvalidStateError once the call has ended."""
        if not self._handling.done():
            await self._commands.put(message)
        if self._handling.done():
            raise asyncio.InvalidStateError("the call has ended")

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF. Raises AioRpcError where the call has ended with another status
        than OK, CancelledError where it was cancelled."""
        message = await self._answers.get()
        self._has_room.set()
        if message is not _END:
            return message
        self._answers.put_nowait(_END)  # it stays the last
        self._handling.result()
        return grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]

    def cancel(self) -> None:
        """End the call on both sides."""
        self._handling.cancel()

    async def _handle(self, find: Callable[[], Callable[..., Any]]) -> None:
        method = find()
        try:
            await method(self._incoming(), _Context(self._answer))
        except grpc.aio.AioRpcError:
            raise
        except Exception as error:
            log.exception("a call within the process failed")
            raise _error(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}") from error

    async def _incoming(self) -> AsyncIterator[Any]:
        while True:
            yield await self._commands.get()

    async def _answer(self, message: Any) -> None:
        while self._answers.qsize() >= _MAX_UNREAD:
            self._has_room.clear()
            await self._has_room.wait()
        self._answers.put_nowait(message)

    def _end(self, handling: asyncio.Task) -> None:
        if not handling.cancelled():
            handling.exception()  # seen: it may go unread
        self._answers.put_nowait(_END)
        while not self._commands.empty():  # so that nobody waits to write where nobody reads any more
            self._commands.get_nowait()


class _Context:
    """What a servicer is given of a call."""

    def __init__(self, write: Callable[[Any], Any]):
        self.write = write

    def peer(self) -> str:
        return "this process"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata=()) -> NoReturn:
        raise _error(code, details)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _refuse(method: str, *args, **options) -> NoReturn:
    raise _error(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not called within a process")
