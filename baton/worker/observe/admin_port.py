"""Serve a worker's --admin port. It answers even before the model is read, which takes half an hour for a large one, so
that a starting process does not look like a dead one."""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from baton.service.net.admin import Admin
from baton.service.observe.metrics import Metrics
from baton.service.observe.process_gauges import process_gauges
from baton.service.security.tls import Tls


class AdminPort:
    """The admin port. `port`: where it listens; `metrics`: those of the process, to which the worker adds its own;
    `readiness`: the answer of /readyz."""

    def __init__(self, model_name: str, hosts: Collection[str], tls: Tls | None):
        """Prepare the pages; `hosts`: names in requests that it answers to; `tls`: that of the worker's other ports."""
        self.metrics = Metrics(model_name)
        self.metrics.collect(*process_gauges(tls))
        self.readiness: Callable[[], tuple[bool, dict]] = lambda: (False, {"ready": False, "state": "starting"})
        self.port = 0
        self._admin = Admin(lambda: self.readiness(), {"/metrics": self.metrics.page}, hosts)

    async def start(self, address: str) -> None:
        """Listen. Raises ListenError."""
        self.port = await self._admin.start(address)

    async def stop(self) -> None:
        """Stop listening. Idempotent."""
        await self._admin.stop()


@asynccontextmanager
async def open_admin(
    address: str, hosts: Collection[str], model_name: str, tls: Tls | None
) -> AsyncIterator[AdminPort]:
    """Answer on the port within the block. Raises ListenError."""
    admin = AdminPort(model_name, hosts, tls)
    await admin.start(address)
    try:
        yield admin
    finally:
        await admin.stop()
