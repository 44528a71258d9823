"""Run tasks for as long as the process runs: a task that fails is logged and started again. Await what must end
although its caller is cancelled, and cancel gRPC's streams."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
SETTLED_S = 60.0  # after work has run for this long, the next pause is the first one again

T = TypeVar("T")

log = logging.getLogger(__name__)


async def supervise(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    fatal: tuple[type[Exception], ...] = (),
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> NoReturn:
    """Run `work()` until cancelled. When it fails or returns, call `on_failure(error)` and start it again after a pause
    that doubles. Raises the errors in `fatal`."""
    loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
    while True:
        began = loop.time()
        try:
            await work()
            failure: Exception = RuntimeError("it came to an end")
        except fatal:
            raise
        except asyncio.CancelledError as error:  # perhaps only something that it waited for was cancelled
            failure = RuntimeError(f"what it waited for was cancelled: {error!r}")
        except Exception as error:
            failure = error
        if is_cancelled():  # work may swallow that, or its clean-up may fail
            raise asyncio.CancelledError
        on_failure(failure)
        pause_s = FIRST_PAUSE_S if loop.time() - began >= SETTLED_S else pause_s
        log.error("%s failed and begins again in %g s: %r", name, pause_s, failure, exc_info=failure)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def start(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    group: asyncio.TaskGroup | None = None,
    fatal: tuple[type[Exception], ...] = (),
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> asyncio.Task[NoReturn]:
    """Return a supervised task of that name, in `group` if given; the caller cancels it. `fatal` and `on_failure` are
    those of `supervise`."""
    supervised = supervise(name, work, fatal=fatal, on_failure=on_failure)
    return (group or asyncio).create_task(supervised, name=name)


def is_cancelled() -> bool:
    """Return whether the running task was cancelled. Code that it awaits may swallow the CancelledError, as redis-py
    8.1 does at times."""
    return (task := asyncio.current_task()) is not None and task.cancelling() > 0


async def await_despite_cancel(future: asyncio.Future[T]) -> T:
    """Return the future's result. If the caller is cancelled, raise that only when `future` has ended, and do not
    cancel `future`."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # mark it as retrieved; the cancellation is what is raised
        raise


def cancel_call(call: Any) -> None:
    """Cancel a stream of grpc.aio, even if a write to it has failed. gRPC counts that stream as ended and does not
    cancel it, but its status never arrives while messages are unread, so it would stay for ever with all that it
    holds."""
    if not call.cancel() and (core := getattr(call, "_cython_call", None)) is not None:
        core.cancel("its write had failed")
