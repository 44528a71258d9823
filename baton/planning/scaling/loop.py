"""The scaler as a process: looks at the fleet, holds the lease, decides once a minute, and performs or tells it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from baton.planning.scaling.lease import LeaderLease
from baton.planning.scaling.live import FleetWatch, GatewayLook
from baton.planning.scaling.scaler import DECIDE_S, ScaleChange, ScaleDecision, Scaler
from baton.service.clock import now
from baton.service.logs import fields

_RENEW_S = 10.0  # a third of the lease

log = logging.getLogger(__name__)

Look = Callable[[], Awaitable[Mapping[str, GatewayLook]]]  # of the gateways that answer, within a bound of time


class Performer(Protocol):
    """What carries changes out. Each call returns when it is begun; what it failed at is tried again in the next minute."""

    async def start(self, role: str, number: int) -> None: ...

    async def drain(self, address: str, next_role: str) -> None:
        """Empty a worker and let it go; with `next_role` it serves in that role afterwards."""
        ...


class ScalerLoop:
    """`run()` until cancelled. `tell(line)` gets what is proposed or done, when that changes."""

    def __init__(
        self, scaler: Scaler, watch: FleetWatch, look: Look, tell: Callable[[str], None], performer: Performer | None = None,
        lease: LeaderLease | None = None,
    ):  # fmt: skip
        """Without `performer` it only proposes, without `lease` it is alone."""
        self._scaler, self._watch, self._look, self._tell = scaler, watch, look, tell
        self._performer, self._lease, self._told = performer, lease, ""

    async def run(self) -> None:
        decided_at = -DECIDE_S
        try:
            while True:
                leads = self._lease is None or await self._lease.hold()
                if now() - decided_at >= DECIDE_S:
                    decided_at = now()
                    await self.turn(leads)
                await asyncio.sleep(min(_RENEW_S, max(0.0, decided_at + DECIDE_S - now())))
        finally:
            if self._lease is not None:
                await self._lease.release()

    async def turn(self, leads: bool = True) -> ScaleDecision | None:
        """Look once; where this one `leads`, decide. Those that follow keep their counters, so that one of them can lead at
        once."""
        seen = self._watch.note(await self._look(), now())
        if seen is None:
            return None
        decision = self._scaler.decide(seen)
        if decision is None or not leads:
            return None
        changes = decision.changes(seen.serving, seen.starting)
        words = "; ".join(f"{change.words}: {decision.reasons[change.next_role or change.role]}" for change in changes)
        if words != self._told:
            self._told = words
            self._tell(f"{'scale' if self._performer else 'would scale'}: {words or 'nothing'}")
        if self._performer is not None:
            for change in changes:
                await self._perform(self._performer, change)
        return decision

    async def _perform(self, performer: Performer, change: ScaleChange) -> None:
        """Least loaded workers go first. What fails is told and done without: one that cannot be reached holds up no other."""
        if change.kind == "start":
            await _told_if_it_fails(performer.start(change.role, change.number), change.words)
            return
        leaving = sorted(self._watch.workers[change.role], key=lambda each: (each.num_running, each.address))
        num_left = change.number
        for worker in leaving:
            if num_left and await _told_if_it_fails(performer.drain(worker.address, change.next_role), worker.address):
                num_left -= 1


async def _told_if_it_fails(call: Awaitable[None], what: str) -> bool:
    try:
        await call
    except Exception as error:
        log.error("a change failed %s", fields(change=what, error=f"{type(error).__name__}: {error}"))
        return False
    return True
