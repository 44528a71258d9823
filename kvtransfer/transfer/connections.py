"""Bound the connections of one transport: those whose ticket is checked, and pending ones, of which few are allowed and
not for long."""

import asyncio
from collections.abc import Coroutine

from kvtransfer.errors import PeerLost
from kvtransfer.transports.transport import KVConnection

WANT_S = 2.0  # from accepting a connection to its complete Want
# Pending connections have no checked ticket yet. Takers come in bursts, each sends its Want a moment after connecting.
# So the oldest pending connection is closed only beyond any burst (MAX_PENDING), or beyond MAX_SILENT if it has been
# silent for SILENT_S.
MAX_PENDING, MAX_SILENT = 512, 64
SILENT_S = 0.25
MAX_ESTABLISHED = 1024


class Connections:
    """Run the dialogues of accepted connections. Called in the event loop only."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Task, tuple[KVConnection, float]] = {}  # with their times of arrival, oldest first
        self._established: set[asyncio.Task] = set()

    def __len__(self) -> int:
        return len(self._pending) + len(self._established)

    def open(self, connection: KVConnection, dialogue: Coroutine) -> None:
        """Run `dialogue`, which owns `connection`, in a task. While it is pending it may be cancelled to make room for
        newer ones."""
        now = asyncio.get_running_loop().time()
        while len(self._pending) >= MAX_PENDING or (len(self._pending) >= MAX_SILENT and self._is_silent(now)):
            self._evict()
        task = asyncio.create_task(dialogue)
        self._pending[task] = connection, now
        task.add_done_callback(self._forget)

    def establish(self) -> None:
        """Note that the calling dialogue's ticket is checked. Raises PeerLost if there are too many; the taker then
        tries again."""
        if len(self._established) >= MAX_ESTABLISHED:
            raise PeerLost("this source has as many takers as it can serve")
        task = asyncio.current_task()
        assert task is not None, "called by a dialogue, which is a task"
        self._pending.pop(task, None)
        self._established.add(task)

    def cancel(self) -> list[asyncio.Task]:
        """Cancel all dialogues; return their tasks, which the caller awaits."""
        tasks = [*self._pending, *self._established]
        for task in tasks:
            task.cancel()
        return tasks

    def _is_silent(self, now: float) -> bool:
        """Return whether the oldest pending connection has been silent for more than SILENT_S."""
        return now - next(iter(self._pending.values()))[1] > SILENT_S

    def _evict(self) -> None:
        task = next(iter(self._pending))
        task.cancel()
        self._forget(task)

    def _forget(self, task: asyncio.Task) -> None:
        if (pending := self._pending.pop(task, None)) is not None:
            pending[0].close()  # a dialogue that was cancelled before it ran has not closed it
        self._established.discard(task)
