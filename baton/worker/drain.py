"""How a worker goes: nothing new comes in, what runs ends, leases are taken or expire, and then everybody is told."""

import asyncio
import logging
import time

from baton.service.logs import fields
from baton.worker.commands import Commands
from baton.worker.session import WorkerService

SETTLE_S = 2.0  # for what was ended by force to give its blocks back
FLUSH_S = 1.0  # for the last words to be read
_POLL_S = 0.01

log = logging.getLogger(__name__)


class Drain:
    """Belongs to the event loop."""

    def __init__(self, commands: Commands, service: WorkerService, grace_s: float):
        self._commands = commands
        self._service = service
        self._grace_s = grace_s

    async def run(self) -> None:
        """From the signal to the last session's end; at most `grace_s` and the seconds above."""
        self._commands.start_draining()
        log.info("draining %s", fields(keys=len(self._commands.legs), grace_s=self._grace_s))
        if not await _until(lambda: not self._commands.legs, self._grace_s):
            log.warning("the grace is over, what still runs is ended %s", fields(keys=len(self._commands.legs)))
            self._commands.on_grace_over()
            if not await _until(lambda: not self._commands.legs, SETTLE_S):
                log.error("some keys did not end %s", fields(keys=len(self._commands.legs)))
        await _until(lambda: all(outbox.is_empty for outbox in self._service.outboxes), FLUSH_S)
        self._service.close_sessions()


async def _until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
