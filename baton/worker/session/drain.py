"""Drain a worker: refuse what is new, let what runs end or move, let leases be taken or expire, close the sessions.

asked (SIGTERM, or Drain) ─► refuses ─► nothing runs │ grace over ─► what runs moves ─► sessions closed ─► exits, or
                                                                     with its KV                      restarts in
                                                                                                      another role
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from baton.service.errors import FailedPrecondition
from baton.service.logs import fields
from baton.worker.session.commands import Commands
from baton.worker.session.sessions import Sessions

ASK_S = 0.5  # for gateways to find another worker, which asks for the KV of the requests that move
SETTLE_S = 3.0  # for what was ended by force to give its blocks back, and for that KV to be pulled
FLUSH_S = 1.0  # for the last words to be read
_POLL_S = 0.01

log = logging.getLogger(__name__)


class Drain:
    """Belongs to the event loop."""

    def __init__(self, commands: Commands, sessions: Sessions, grace_s: float):
        """`grace_s`: how long what runs may take, unless a Drain says otherwise."""
        self.asked = asyncio.Event()
        self.next_role = ""
        self.stays_away = False
        self._commands = commands
        self._sessions = sessions
        self._grace_s = grace_s
        self._until = math.inf  # of the grace, time.monotonic()

    def ask(self, next_role: str, grace_s: float, stay_away: bool = False) -> int:
        """Begin to drain, and return how many legs still run. Asked again, it may shorten the grace, or let the worker
        stay away. Raises FailedPrecondition when asked for another role to come next."""
        if not self.asked.is_set():
            self.next_role = next_role
            self._begin(grace_s or self._grace_s)
        elif next_role != self.next_role:
            after = f"to be a {self.next_role} worker" if self.next_role else "to end"
            raise FailedPrecondition(f"it drains already, {after}", reason="DRAINING")
        elif grace_s:
            self._begin(grace_s)
        self.stays_away |= stay_away
        return self._commands.legs.num_busy

    async def end_on(self, stop: asyncio.Event) -> None:
        """Wait for the signal to end, and begin to drain, or shorten the grace to the worker's own. No role comes
        next."""
        await stop.wait()
        self.next_role = ""
        self._begin(self._grace_s)

    async def run(self) -> None:
        """Wait until the last session has ended; at most the grace and the seconds above."""
        legs = self._commands.legs
        log.info("draining %s", fields(keys=legs.num_busy, grace_s=self._until - time.monotonic()))
        if not await _until(lambda: not legs.num_busy, lambda: self._until):
            log.warning("the grace is over: running requests move to other workers %s", fields(keys=legs.num_busy))
            self._commands.on_grace_over()
            await asyncio.sleep(ASK_S)
            if not await _until(lambda: not legs.num_busy, _in(SETTLE_S)):
                log.error("some keys did not end %s", fields(keys=legs.num_busy))
        await _until(lambda: all(outbox.is_empty for outbox in self._sessions.outboxes), _in(FLUSH_S))
        self._sessions.hang_up()

    def _begin(self, grace_s: float) -> None:
        self._until = min(self._until, time.monotonic() + grace_s)
        self._commands.start_draining()
        self.asked.set()


def _in(seconds: float) -> Callable[[], float]:
    at = time.monotonic() + seconds
    return lambda: at


async def _until(condition: Callable[[], bool], deadline: Callable[[], float]) -> bool:
    """Wait for a condition, and return whether it came true by `deadline()`, which may come nearer meanwhile."""
    while not condition():
        if time.monotonic() >= deadline():
            return False
        await asyncio.sleep(_POLL_S)
    return True
