"""Kills tasks of the process that a test runs in: what they wait for raises, or is cancelled."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from tests.support.pace import patience
from tests.support.process import ROOT


class Killed(Exception):
    """No code expects this one."""


def our_tasks(main: str = "Gateway.run") -> dict[str, list[asyncio.Task]]:
    """Return those whose code is in this repository, its tests and `main` aside, by name without an address behind
    it."""
    found: dict[str, list[asyncio.Task]] = {}
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        path = Path(code.co_filename) if code else Path("/")
        is_ours = path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests")
        if is_ours and code.co_qualname != main:
            found.setdefault(kind_of(task.get_name()), []).append(task)
    return found


def kind_of(name: str) -> str:
    """Return `link` of `link 127.0.0.1:5`."""
    words = name.split(" ")
    return " ".join(word for word in words if ":" not in word and not word.isdecimal()) or name


def waits_for_children(task: asyncio.Task) -> bool:
    """Return whether a task only waits for the tasks of its group."""
    return _innermost(task).__qualname__ == "TaskGroup.__aexit__"


async def kill(task: asyncio.Task, end: Exception | None) -> None:
    """End a task: what it waits for raises `end`, or is cancelled."""
    async with asyncio.timeout(patience(10)):
        while not task.done():
            waiter = None if _is_pausing(task) else task._fut_waiter
            while isinstance(waiter, asyncio.Task):
                waiter = waiter._fut_waiter
            if waiter is not None and not waiter.done():
                waiter.set_exception(end) if end else waiter.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                return
            await asyncio.sleep(0.001)


def _is_pausing(task: asyncio.Task) -> bool:
    """Return whether a supervised task waits before it begins again."""
    coroutine = task.get_coro()
    inner = getattr(coroutine, "cr_await", None)
    return coroutine.__qualname__ == "supervise" and getattr(inner, "__qualname__", "") == "sleep"


def _innermost(task: asyncio.Task):
    chain = list(_awaited(task.get_coro()))
    return next(each for each in reversed(chain) if hasattr(each, "__qualname__"))


def _awaited(coroutine) -> Iterator[object]:
    while coroutine is not None:
        yield coroutine
        coroutine = getattr(coroutine, "cr_await", None)
