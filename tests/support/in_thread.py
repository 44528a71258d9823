"""Servers of asyncio for tests that block."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future


@contextlib.contextmanager
def serving_in_thread(serve: Callable[[], contextlib.AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """Run a server in a loop and a thread of its own; yields its address, which `serve` yields."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        try:
            async with serve() as address:
                stopping = asyncio.Event()
                started.set_result((address, asyncio.get_running_loop(), stopping))
                await stopping.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    address, loop, stopping = started.result()
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
