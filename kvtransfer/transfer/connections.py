"""The connections of one transport: those whose ticket has been checked, and strangers, who have few places and little
time."""

import asyncio
from collections.abc import Coroutine

from kvtransfer.errors import PeerLost
from kvtransfer.transports.transport import Line

WANT_S = 2.0  # from being accepted to a whole Want, however its bytes come
# Without a checked ticket. Takers come in bursts, and their Want a moment later than they: only where more come than
# any burst has, or where the oldest has been silent for a while, does it go.
MAX_PENDING, MAX_SILENT = 512, 64
SILENT_S = 0.25
MAX_ESTABLISHED = 1024


class Connections:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Task, tuple[Line, float]] = {}  # and when they came, in that order
        self._established: set[asyncio.Task] = set()

    def __len__(self) -> int:
        return len(self._pending) + len(self._established)

    def open(self, line: Line, dialogue: Coroutine) -> None:
        """Run `dialogue`, which owns `line`, until it is established and beyond; or until it is the oldest that is
        not, and there is no place."""
        now = asyncio.get_running_loop().time()
        while len(self._pending) >= MAX_PENDING or (len(self._pending) >= MAX_SILENT and self._is_silent(now)):
            self._evict()
        task = asyncio.create_task(dialogue)
        self._pending[task] = line, now
        task.add_done_callback(self._forget)

    def establish(self) -> None:
        """Note that the dialogue that calls has shown its ticket. Raises PeerLost where there are too many: a taker
        comes back."""
        if len(self._established) >= MAX_ESTABLISHED:
            raise PeerLost("this source has as many takers as it can serve")
        task = asyncio.current_task()
        assert task is not None, "called by a dialogue, which is a task"
        self._pending.pop(task, None)
        self._established.add(task)

    def cancel(self) -> list[asyncio.Task]:
        """Cancel all; return their tasks, which have to be awaited."""
        tasks = [*self._pending, *self._established]
        for task in tasks:
            task.cancel()
        return tasks

    def _is_silent(self, now: float) -> bool:
        """Return whether the oldest has had its time."""
        return now - next(iter(self._pending.values()))[1] > SILENT_S

    def _evict(self) -> None:
        task = next(iter(self._pending))
        task.cancel()
        self._forget(task)

    def _forget(self, task: asyncio.Task) -> None:
        if (pending := self._pending.pop(task, None)) is not None:
            pending[0].close()  # a dialogue that was cancelled before it ran has not
        self._established.discard(task)
