"""Threads for work on long texts. A tenant uses at most all threads but one, a free thread goes to the tenant that uses
fewest, and work that is cancelled before it begins is never done."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# At least three: one is left for other tenants, and a tenant's long text does not delay its other texts.
NUM_THREADS = min(4, max(3, os.cpu_count() or 1))
# Threads that check constraints, each with a process that holds the vocabulary in memory.
NUM_CHECKS = min(4, max(2, os.cpu_count() or 1))


class TextThreads:
    """A pool of threads that tenants share fairly. Belongs to the event loop. AdmissionControl bounds the waiting
    calls."""

    def __init__(self, num_threads: int = NUM_THREADS, name: str = "text"):
        """Start all threads, so that no later call fails for want of one. Raises RuntimeError if the system refuses a
        thread."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._start_threads(num_threads)
        self._num_idle, self._max_of_tenant = num_threads, max(1, num_threads - 1)
        # Waiting work by tenant; the tenant whose turn it is comes first.
        self._pending: dict[str, dict[asyncio.Future, Callable[[], object]]] = {}
        self._num_running: Counter[str] = Counter()  # threads in use, by tenant

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread; return or raise what it does. If the call is cancelled, the thread stays in use until
        the work has ended."""
        future = asyncio.get_running_loop().create_future()
        self._pending.setdefault(tenant, {})[future] = work
        self._begin()
        try:
            return await future
        finally:
            self._remove(tenant, future)

    def close(self) -> None:
        """Cancel pending work and end each thread once its work has ended."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start_threads(self, num_threads: int) -> None:
        """Start every thread. An executor starts a thread only if none is idle, so each one waits until all have
        started."""
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
            future = next(iter(self._pending[tenant]))
            work = self._remove(tenant, future)
            if work is None or future.cancelled():
                continue
            if tenant in self._pending:
                self._pending[tenant] = self._pending.pop(tenant)  # other tenants come first now
            self._num_idle -= 1
            self._num_running[tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, work)
            running.add_done_callback(lambda ended, tenant=tenant, future=future: self._ended(tenant, future, ended))

    def _next(self) -> str | None:
        """Return the tenant whose work is next, the first of those that use fewest threads; None: no work may begin."""
        fewest = min(self._pending, key=lambda tenant: self._num_running[tenant], default=None)
        return None if fewest is None or self._num_running[fewest] >= self._max_of_tenant else fewest

    def _remove(self, tenant: str, future: asyncio.Future) -> Callable[[], object] | None:
        """Remove waiting work and return it, or None if it was removed before."""
        pending = self._pending.get(tenant, {})
        work = pending.pop(future, None)
        if not pending:
            self._pending.pop(tenant, None)
        return work

    def _ended(self, tenant: str, future: asyncio.Future, ended: asyncio.Future) -> None:
        self._num_idle += 1
        self._num_running[tenant] -= 1
        self._num_running += Counter()  # forgets tenants that use none
        if future.done():
            ended.exception()  # the call was cancelled: nobody else takes the error
        elif error := ended.exception():
            future.set_exception(error)
        else:
            future.set_result(ended.result())
        self._begin()
