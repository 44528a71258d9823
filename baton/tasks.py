"""Tasks that run for as long as their process does: one that fails says so and begins again. What is awaited to its end
though its caller is cancelled, and what gRPC leaves to its callers to cancel."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
SETTLED_S = 60.0  # work that has run for this long begins again after the first pause

T = TypeVar("T")

log = logging.getLogger(__name__)


async def supervise(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    fatal: tuple[type[Exception], ...] = (),
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> NoReturn:
    """Runs `work()` until cancelled. When it fails, or returns, `on_failure(error)` is called and it begins again after
    a pause that doubles. Raises what is one of `fatal`."""
    loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
    while True:
        began = loop.time()
        try:
            await work()
            _leave_if_cancelled()
            raise RuntimeError("it came to an end")
        except fatal:
            raise
        except asyncio.CancelledError as error:  # perhaps of something that it waited for
            _leave_if_cancelled()
            failure: Exception = RuntimeError(f"what it waited for was cancelled: {error!r}")
        except Exception as error:
            failure = error
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
    """Return a supervised task of that name, in `group` if there is one; to be cancelled. `fatal` and `on_failure` as
    of `supervise`."""
    supervised = supervise(name, work, fatal=fatal, on_failure=on_failure)
    return (group or asyncio).create_task(supervised, name=name)


def is_cancelled() -> bool:
    """Return whether the running task was cancelled. What it awaits may swallow the CancelledError, as redis-py 8.1
    does at times."""
    return (task := asyncio.current_task()) is not None and task.cancelling() > 0


async def await_despite_cancel(future: asyncio.Future[T]) -> T:
    """Return its result. A cancellation of the caller is raised only once `future` has ended, and not passed on to
    it."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what counts
        raise


def cancel_call(call: Any) -> None:
    """Cancel a stream of grpc.aio, also one whose write has failed: gRPC takes that for ended and cancels it no more,
    but its status never comes while messages are unread, and it stays for ever with all that it holds."""
    if not call.cancel() and (core := getattr(call, "_cython_call", None)) is not None:
        core.cancel("its write had failed")


def _leave_if_cancelled() -> None:
    if is_cancelled():
        raise asyncio.CancelledError
