"""Send load, index events and health without being asked, and check that the ledger adds up."""

import asyncio
import logging
import time

from baton import tasks
from baton.engine.engine import Engine
from baton.engine.loop import EngineLoop
from baton.service.fatal import exit_for_hung_device, exit_if_out_of_memory
from baton.service.logs import fields
from baton.service.net.server import Health
from baton.service.observe.core_wait import CoreWait
from baton.worker.observe.tables import Tables
from baton.worker.session.leg_dispatcher import LegDispatcher
from baton.worker.session.sessions import Sessions
from baton.worker.wire import messages

LOAD_INTERVAL_S = 0.25
LOAD_GAP_S = 0.02  # between two reports of changes
INDEX_INTERVAL_S = 0.05
LEDGER_INTERVAL_S = 0.5
STALLED_AFTER_S = 3.0  # a loop that has work and does not step
SLOWER_THAN_BEST = 10  # a step of a large model may take so many times its best time before it counts as stalled
HUNG_AFTER = 10  # so many times longer than until stalled, the process of a GPU ends: a hung kernel never returns
COMPILED_WITHIN_S = 600.0  # compiling a kernel for longer counts as stalled
INTEGRITY_INTERVAL_S = 5.0
SERVICE_NAME = "baton.v1.Worker"

log = logging.getLogger(__name__)


class Reports:
    """Send reports until `run` is cancelled. Used in the event loop only."""

    def __init__(
        self, engine: Engine, loop: EngineLoop, dispatcher: LegDispatcher, sessions: Sessions, health: Health,
        tables: Tables, changed: asyncio.Event, longest_step_s: float = 0.0,
    ):  # fmt: skip
        """Report when `changed` is set, which means that the load has changed, and every LOAD_INTERVAL_S.
        `longest_step_s`: the best time of the largest step; 0: unknown."""
        self._patience_s = max(STALLED_AFTER_S, SLOWER_THAN_BEST * longest_step_s)
        self._engine = engine
        self._loop = loop
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._health = health
        self._tables = tables
        self._changed = changed
        self._checked_at = time.monotonic()
        self._checked_step = -1
        self._core_wait = CoreWait()

    @property
    def state(self) -> str:
        """Return serving, compiling, draining or stalled."""
        if not self._loop.is_alive:
            return "stalled"
        if self._silent_s > self._patience_s:
            return "compiling" if self._is_compiling else "stalled"
        return "draining" if self._dispatcher.is_draining else "serving"

    @property
    def _silent_s(self) -> float:
        """Return for how long the engine has not stepped although it has work."""
        return time.monotonic() - self._loop.last_beat if self._engine.has_work() else 0.0

    @property
    def _is_compiling(self) -> bool:
        watch = self._engine.runner.launcher.compiling
        since = None if watch is None else watch.since
        return since is not None and time.monotonic() - since < COMPILED_WITHIN_S

    def exit_if_hung(self) -> None:
        """End the process if its GPU hangs in one step."""
        silent_s = self._silent_s
        is_hung = silent_s > HUNG_AFTER * self._patience_s and not self._is_compiling
        if is_hung and self._engine.pool.device.type == "cuda":
            exit_for_hung_device(silent_s)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, work in (
                ("loads", self._send_loads), ("index events", self._send_index), ("ledger watch", self._watch_ledger)
            ):  # fmt: skip
                tasks.start(name, work, group=group, on_failure=exit_if_out_of_memory)

    async def _send_loads(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            report, core_wait = self._engine.load_report(), self._core_wait.share()
            self._sessions.send_load(messages.load_to_proto(report, self.state, self._tables.counts(), core_wait))
            self._set_health()
            self.exit_if_hung()
            await asyncio.sleep(LOAD_GAP_S)

    async def _send_index(self) -> None:
        while True:
            self._sessions.send_block_events()
            await asyncio.sleep(INDEX_INTERVAL_S)

    async def _watch_ledger(self) -> None:
        while True:
            self._check_integrity()
            await asyncio.sleep(LEDGER_INTERVAL_S)

    def _set_health(self) -> None:
        """Report the health of the engine's loop as the gRPC health of this process."""
        serving = self.state in ("serving", "compiling")
        for service in ("", SERVICE_NAME):
            self._health.set(service, serving)

    def _check_integrity(self) -> None:
        """Check the ledger when nothing runs, if something has run since the last check."""
        now, step = time.monotonic(), self._engine.step_number
        is_idle = not self._dispatcher.legs and not self._engine.has_work()
        if not is_idle or step == self._checked_step or now - self._checked_at < INTEGRITY_INTERVAL_S:
            return
        self._checked_at, self._checked_step = now, step
        try:
            self._engine.check_integrity()
        except AssertionError as error:
            log.error("LEDGER BROKEN: blocks are counted wrong; restart this worker %s", fields(why=error))
