"""Threads for work on long texts. A tenant has all but one at most, the next one is for the tenant that has fewest, and
work that is cancelled before its thread begins is never done."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# Three at least: one tenant never has them all, and one long text of a tenant does not hold up its others.
NUM_THREADS = min(4, max(3, os.cpu_count() or 1))
# Of constraints, each beside a process that has the vocabulary in memory.
NUM_CHECKS = min(4, max(2, os.cpu_count() or 1))


class TextThreads:
    """Belongs to the event loop. Waiting calls are counted by AdmissionControl, which bounds them."""

    def __init__(self, num_threads: int = NUM_THREADS, name: str = "text"):
        """Raises RuntimeError where the system refuses a thread: all are started here, and no call fails of it
        later."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._start_threads(num_threads)
        self._num_idle, self._most_of_one = num_threads, max(1, num_threads - 1)
        # Of tenants with work that waits: whose turn it is comes first.
        self._lines: dict[str, dict[asyncio.Future, Callable[[], object]]] = {}
        self._num_taken: Counter[str] = Counter()  # threads, by tenant

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Return or raise what `work` does. After a call has gone, its thread stays taken until its work has ended."""
        future = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, {})[future] = work
        self._begin()
        try:
            return await future
        finally:
            self._take(tenant, future)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start_threads(self, num_threads: int) -> None:
        """The executor starts a thread where none is idle: here each waits until the last one is there."""
        all_here = threading.Barrier(num_threads + 1)
        try:
            for _ in range(num_threads):
                self._executor.submit(all_here.wait)
            all_here.wait()
        except RuntimeError:
            all_here.abort()
            self.close()
            raise

    def _begin(self) -> None:
        while self._num_idle and (tenant := self._next()) is not None:
            future = next(iter(self._lines[tenant]))
            work = self._take(tenant, future)
            if work is None or future.cancelled():
                continue
            if tenant in self._lines:
                self._lines[tenant] = self._lines.pop(tenant)  # the turn is the others'
            self._num_idle -= 1
            self._num_taken[tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, work)
            running.add_done_callback(lambda ended, tenant=tenant, future=future: self._ended(tenant, future, ended))

    def _next(self) -> str | None:
        """Return whose work is next: of the tenants with fewest threads the first."""
        fewest = min(self._lines, key=lambda tenant: self._num_taken[tenant], default=None)
        return None if fewest is None or self._num_taken[fewest] >= self._most_of_one else fewest

    def _take(self, tenant: str, future: asyncio.Future) -> Callable[[], object] | None:
        """Take work out of its line; None: it was taken before."""
        line = self._lines.get(tenant, {})
        work = line.pop(future, None)
        if not line:
            self._lines.pop(tenant, None)
        return work

    def _ended(self, tenant: str, future: asyncio.Future, ended: asyncio.Future) -> None:
        self._num_idle += 1
        self._num_taken[tenant] -= 1
        self._num_taken += Counter()  # those that have none are forgotten
        if future.done():
            ended.exception()  # its call has gone
        elif error := ended.exception():
            future.set_exception(error)
        else:
            future.set_result(ended.result())
        self._begin()
