"""The scaler as a process: it reads the fleet's counters, holds the lease, decides once a minute, and carries changes
out or prints them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Protocol

from baton.lines import one_line
from baton.planning.scaling.counters import FleetCounters, Placed
from baton.planning.scaling.lease import LeaderLease
from baton.planning.scaling.live import FleetWatch, GatewayLook, WorkerLoad
from baton.planning.scaling.scaler import DECIDE_S, ScaleChange, ScaleDecision, Scaler
from baton.protocol import ROLES
from baton.service.clock import now
from baton.service.logs import fields
from baton.tasks import is_cancelled

_RENEW_S = 10.0  # a third of the lease

log = logging.getLogger(__name__)

# Returns each gateway's report; None for one that did not answer in time.
Look = Callable[[], Awaitable[Mapping[str, GatewayLook | None]]]


class Performer(Protocol):
    """Carries changes out. Each call returns once the change has begun; what fails is tried again in the next
    minute."""

    async def placed(self) -> list[Placed]:
        """Return the workers that it has started and keeps, including those that still load their model."""
        ...

    async def start(self, role: str, number: int) -> None: ...

    async def drain(self, address: str, next_role: str) -> None:
        """Drain a worker and let it exit, or serve in `next_role` afterwards."""
        ...


class ScalerLoop:
    """The scaler's loop: `run()` until cancelled. `report(line)` receives the changes that are proposed or made, when
    they differ from the last."""

    def __init__(
        self,
        scaler: Scaler,
        watch: FleetWatch,
        look: Look,
        report: Callable[[str], None],
        performer: Performer | None = None,
        lease: LeaderLease | None = None,
    ):
        """Make the loop. Without `performer` it only proposes; without `lease` it assumes that no other scaler runs."""
        self._scaler, self._watch, self._look, self._report = scaler, watch, look, report
        self._performer, self._lease, self._reported = performer, lease, ""

    async def run(self) -> None:
        decided_at = -DECIDE_S
        try:
            while not is_cancelled():  # checked, since the Redis client may swallow the cancellation
                leads = await self._leads()
                if now() - decided_at >= DECIDE_S:
                    decided_at = now()
                    await self.turn(leads)
                await asyncio.sleep(min(_RENEW_S, max(0.0, decided_at + DECIDE_S - now())))
        finally:
            if self._lease is not None:
                await self._lease.release()

    async def turn(self, leads: bool = True) -> ScaleDecision | None:
        """Read the counters once; if this scaler `leads`, decide. Scalers that follow keep their counters too, so that
        one can lead immediately."""
        seen = await self._seen()
        if seen is None:
            return None
        decision = self._scaler.decide(seen)
        # Asked again, since a look that reads a model's files may take longer than the lease.
        if decision is None or not leads or not await self._leads():
            return None
        changes = decision.changes(seen.serving, seen.starting)
        words = "; ".join(f"{change.words}: {decision.reasons[change.next_role or change.role]}" for change in changes)
        if words != self._reported:
            self._reported = words
            self._report(f"{'scale' if self._performer else 'would scale'}: {words or 'nothing'}")
        if self._performer is not None:
            leaving = {role: iter(sorted(self._watch.workers[role], key=_load_of)) for role in ROLES}
            for change in changes:
                await _perform(self._performer, change, leaving[change.role], self._leads)
        return decision

    async def _leads(self) -> bool:
        return self._lease is None or await self._lease.hold()

    async def _seen(self) -> FleetCounters | None:
        """Return the counters since the previous look; None for the first, and if it is unknown which workers are
        starting."""
        seen = self._watch.note(await self._look(), now())
        if seen is None or self._performer is None:
            return seen
        try:
            return self._watch.with_placed(seen, await self._performer.placed())
        except Exception as error:
            log.error(
                "which workers start is unknown: nothing is decided %s",
                fields(error=f"{type(error).__name__}: {one_line(error)}"),
            )
            return None


async def _perform(
    performer: Performer, change: ScaleChange, leaving: Iterator[WorkerLoad], leads: Callable[[], Awaitable[bool]]
) -> None:
    """Carry one change out. `leaving` yields the role's workers that no other change has asked, in the order in which
    they should leave. Failures are logged, so an unreachable worker holds up no other. A worker that failed to change
    its role may have exited, so no other is asked in its place. `leads` renews the lease, and is asked each time: some
    workers that do not answer take longer than it lasts."""
    if change.kind == "start":
        if await leads():
            await _succeeds(performer.start(change.role, change.number), change.words)
        return
    num_left = change.number
    while num_left and (worker := next(leaving, None)) and await leads():
        is_asked = await _succeeds(performer.drain(worker.address, change.next_role), worker.address)
        num_left -= is_asked or change.kind == "change"


def _load_of(worker: WorkerLoad) -> tuple[int, str]:
    """Return the sort key of workers to drain: the least loaded first."""
    return worker.num_running, worker.address


async def _succeeds(call: Awaitable[None], what: str) -> bool:
    try:
        await call
    except Exception as error:
        log.error("a change failed %s", fields(change=what, error=f"{type(error).__name__}: {one_line(error)}"))
        return False
    return True
