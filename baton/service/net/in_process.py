"""Calls to a service of the same process: message objects are handed over without a socket and without serialization.

A channel offers the part of grpc.aio's interface that a generated stub needs for bidirectional streams."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import grpc

_MAX_UNREAD = 16  # unread messages in one direction; a further write waits
_END = object()
_channels: dict[str, "InProcessChannel"] = {}

log = logging.getLogger(__name__)


class InProcessChannel:
    """A channel to the servicer that `serve` names. Both sides belong to one event loop."""

    def __init__(self) -> None:
        self._servicer: object | None = None

    def serve(self, servicer: object) -> None:
        """Send calls that begin from now on to `servicer`, which has the methods of a generated servicer."""
        self._servicer = servicer

    async def __aenter__(self) -> "InProcessChannel":
        return self

    async def __aexit__(self, *exc) -> None:
        """Do nothing: calls end by themselves, and other callers use the channel too."""

    def stream_stream(self, method: str, *unused, **options) -> Callable[[], "InProcessCall"]:
        """Return a callable that calls `method`, "/package.Service/Name"."""
        return lambda: InProcessCall(partial(self._handler, method.rpartition("/")[2]))

    def unary_unary(self, method: str, *unused, **options) -> Callable[..., NoReturn]:
        """Return a callable that refuses: only operators make unary calls, and they are other processes."""
        return partial(_refuse, method)

    def _handler(self, name: str) -> Callable[..., Any]:
        """Return the method of the servicer. Raises AioRpcError if nothing serves yet."""
        if self._servicer is None:
            raise _error(grpc.StatusCode.UNAVAILABLE, "it has not started yet")
        return getattr(self._servicer, name)


@contextmanager
def reachable_as(address: str) -> Iterator[InProcessChannel]:
    """Make a servicer of this process reachable by `channel_to(address)` within the block."""
    _channels[address] = channel = InProcessChannel()
    try:
        yield channel
    finally:
        del _channels[address]


def channel_to(address: str) -> InProcessChannel | None:
    """Return the channel to the servicer that this process serves at `address`; None if another process does."""
    return _channels.get(address)


class InProcessCall:
    """The caller's side of one call, with the interface of grpc.aio.StreamStreamCall."""

    def __init__(self, find: Callable[[], Callable[..., Any]]):
        """Start the call. `find()` returns the servicer's method or raises AioRpcError, which the first read then
        raises."""
        self._commands: asyncio.Queue[Any] = asyncio.Queue(_MAX_UNREAD)
        self._answers: asyncio.Queue[Any] = asyncio.Queue()  # `_answer` bounds it; `_END` always fits
        self._has_room = asyncio.Event()
        self._handling = asyncio.create_task(self._handle(find), name="call within the process")
        self._handling.add_done_callback(self._end)

    async def write(self, message: Any) -> None:
        """Send a message, which nobody may change afterwards. Waits while too many are unread. Raises
        asyncio.InvalidStateError once the call has ended."""
        if not self._handling.done():
            await self._commands.put(message)
        if self._handling.done():
            raise asyncio.InvalidStateError("the call has ended")

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF. Raises AioRpcError if the call ended with a status other than OK,
        CancelledError if it was cancelled."""
        message = await self._answers.get()
        self._has_room.set()
        if message is not _END:
            return message
        self._answers.put_nowait(_END)  # stays last for later reads
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
            handling.exception()  # marks it as retrieved, in case nobody reads it
        self._answers.put_nowait(_END)
        while not self._commands.empty():  # wakes writers, since nobody reads any more
            self._commands.get_nowait()


class _Context:
    """The context of a call that its servicer receives."""

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
