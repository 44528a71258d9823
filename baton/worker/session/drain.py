"""Drain a worker: refuse new requests, let running ones end or move, let leases be taken or expire, close sessions.

asked (SIGTERM, or Drain) ─► refuses ─► nothing runs │ grace over ─► requests move ─► sessions closed ─► exits, or
                                                                     with their KV                    restarts in
                                                                                                      another role
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable

from baton.protocol import AWAY, KEEPER_VARIABLE, RESTARTS
from baton.service.errors import FailedPrecondition
from baton.service.logs import fields
from baton.worker.session.leg_dispatcher import LegDispatcher
from baton.worker.session.sessions import Sessions

ASK_S = 0.5  # for gateways to find other workers, which then ask for the KV of requests that move
SETTLE_S = 3.0  # for that KV to be pulled, and for ended requests to give their blocks back
FLUSH_S = 1.0  # for gateways to read the last events
_POLL_S = 0.01

log = logging.getLogger(__name__)


class Drain:
    """Drain the worker once it is asked to. Called in the event loop."""

    def __init__(self, dispatcher: LegDispatcher, sessions: Sessions, grace_s: float):
        """Drain within `grace_s`, in which running requests may end, unless a Drain call names another grace."""
        self.asked = asyncio.Event()
        self.next_role = ""
        self.stays_away = False
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._grace_s = grace_s
        self._until = math.inf  # when the grace ends, on time.monotonic()

    def ask(self, next_role: str, grace_s: float, stay_away: bool = False) -> int:
        """Begin to drain; return how many legs still run. A second call may shorten the grace, or ask that the worker
        stays away. Raises FailedPrecondition if it asks for another next role."""
        if not self.asked.is_set():
            self.next_role = next_role
            self._begin(grace_s or self._grace_s)
        elif next_role != self.next_role:
            after = f"to be a {self.next_role} worker" if self.next_role else "to end"
            raise FailedPrecondition(f"it drains already, {after}", reason="DRAINING")
        elif grace_s:
            self._begin(grace_s)
        self.stays_away |= stay_away
        self._tell_keeper()
        return self._dispatcher.legs.num_busy

    async def end_on(self, stop: asyncio.Event) -> None:
        """Wait for the signal to end; then begin to drain, or shorten the grace to the worker's own. No other role
        follows."""
        await stop.wait()
        self.next_role = ""
        self._begin(self._grace_s)
        self._tell_keeper()

    async def run(self) -> None:
        """Drain until all sessions are closed; this takes the grace and the times above at most."""
        legs = self._dispatcher.legs
        log.info("draining %s", fields(keys=legs.num_busy, grace_s=self._until - time.monotonic()))
        if not await _until(lambda: not legs.num_busy, lambda: self._until):
            log.warning("the grace is over: running requests move to other workers %s", fields(keys=legs.num_busy))
            self._dispatcher.on_grace_over()
            await asyncio.sleep(ASK_S)
            if not await _until(lambda: not legs.num_busy, _in(SETTLE_S)):
                log.error("some keys did not end %s", fields(keys=legs.num_busy))
        outboxes = self._sessions.outboxes
        # Who has not heard that it drains takes it for one that has died.
        await _until(lambda: all(each.is_empty and each.told_state == "draining" for each in outboxes), _in(FLUSH_S))
        self._sessions.hang_up()

    def _begin(self, grace_s: float) -> None:
        self._until = min(self._until, time.monotonic() + grace_s)
        self._dispatcher.start_draining()
        self.asked.set()

    def _tell_keeper(self) -> None:
        """Tell the keeper of this process what comes next, which it would otherwise learn at the end."""
        if KEEPER_VARIABLE in os.environ:
            follows = AWAY if self.stays_away else self.next_role or RESTARTS
            print(f"draining next={follows}", flush=True)


def _in(seconds: float) -> Callable[[], float]:
    at = time.monotonic() + seconds
    return lambda: at


async def _until(condition: Callable[[], bool], deadline: Callable[[], float]) -> bool:
    """Wait for `condition`; return whether it came true by `deadline()`, which may move closer meanwhile."""
    while not condition():
        if time.monotonic() >= deadline():
            return False
        await asyncio.sleep(_POLL_S)
    return True
