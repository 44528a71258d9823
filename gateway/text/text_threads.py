"""Threads for work on long texts. A tenant has one at most, tenants take turns, and work that is cancelled before its
thread begins is never done."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# Two at least, so that one tenant never has them all.
NUM_THREADS = min(4, max(2, os.cpu_count() or 1))


class TextThreads:
    """Belongs to the event loop. Waiting calls are counted by AdmissionControl, which bounds them."""

    def __init__(self, num_threads: int = NUM_THREADS):
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_idle = num_threads
        self._lines: dict[str, dict[asyncio.Future, Callable[[], object]]] = {}  # by tenant
        self._turns: deque[str] = deque()  # tenants in line, those that have a thread left out

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Return or raise what `work` does. After a call has gone, its tenant's thread stays taken until its work has
        ended."""
        future = asyncio.get_running_loop().create_future()
        if tenant not in self._lines:
            self._lines[tenant] = {}
            self._turns.append(tenant)
        line = self._lines[tenant]
        line[future] = work
        self._begin()
        try:
            return await future
        finally:
            line.pop(future, None)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._num_idle and self._turns:
            tenant = self._turns.popleft()
            line = self._lines[tenant]
            if not line:
                del self._lines[tenant]
                continue
            future = next(iter(line))
            work = line.pop(future)
            if future.cancelled():
                self._turns.appendleft(tenant)
                continue
            self._num_idle -= 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, work)
            running.add_done_callback(lambda ended, tenant=tenant, future=future: self._ended(tenant, future, ended))

    def _ended(self, tenant: str, future: asyncio.Future, ended: asyncio.Future) -> None:
        self._num_idle += 1
        self._turns.append(tenant)
        if future.done():
            ended.exception()  # its call has gone
        elif error := ended.exception():
            future.set_exception(error)
        else:
            future.set_result(ended.result())
        self._begin()
