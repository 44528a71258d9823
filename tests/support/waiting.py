"""Wait for a condition, as long as this machine may need for it."""

import asyncio
import inspect
import time
from collections.abc import Callable

from tests.support.pace import patience

What = str | Callable[[], object]  # of the error's text; a function is asked when the time is over


def until(holds: Callable[[], object], what: What = "", timeout_s: float = 30, pause_s: float = 0.005):
    """Return the first true value of `holds()`. Raises AssertionError with `what` where there is none in time."""
    deadline = time.monotonic() + patience(timeout_s)
    while not (found := holds()):
        assert time.monotonic() < deadline, _words(what, timeout_s)
        time.sleep(pause_s)
    return found


async def until_async(holds: Callable[[], object], what: What = "", timeout_s: float = 30):
    """Do as `until` in an event loop; `holds` may be a coroutine function."""
    try:
        async with asyncio.timeout(patience(timeout_s)):
            while not (found := await _told(holds)):
                await asyncio.sleep(0.002)
            return found
    except TimeoutError as error:
        raise AssertionError(_words(what, timeout_s)) from error


async def _told(holds: Callable[[], object]) -> object:
    told = holds()
    return await told if inspect.isawaitable(told) else told


def _words(what: What, timeout_s: float) -> str:
    return f"not so within {patience(timeout_s):g} s: {what() if callable(what) else what}"
