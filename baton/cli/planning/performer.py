"""Carry out the scaler's decisions through a launcher and the workers' own Drain."""

from __future__ import annotations

import asyncio

from baton.cli.launch.placing.launcher import LaunchError, WorkerLauncher
from baton.planning.scaling.counters import Placed
from baton.service.net.client import open_channel
from baton.service.security.access import Access
from baton.service.security.tls import WORKER_NAME
from baton.v1 import worker_pb2, worker_pb2_grpc

_CALL_S = 10.0


class FleetPerformer:
    """Starts and drains workers. Without `launcher` it cannot start any: it prints how many are needed, and something
    else has to start them."""

    def __init__(self, access: Access, launcher: WorkerLauncher | None = None):
        self._access, self._launcher = access, launcher

    async def placed(self) -> list[Placed]:
        """Return the workers that the launcher has placed; empty without one. Raises LaunchError, TimeoutError."""
        if self._launcher is None:
            return []
        async with asyncio.timeout(_CALL_S):
            return [Placed(worker.role, worker.address) for worker in await self._launcher.list() if worker.stays]

    async def start(self, role: str, number: int) -> None:
        """Start workers. Raises LaunchError."""
        if self._launcher is None:
            many = "s" if number > 1 else ""
            print(f"start {number} {role} worker{many}: nothing here can; they join by themselves", flush=True)
            return
        await self._launcher.start(role, number)

    async def drain(self, address: str, next_role: str) -> None:
        """Drain a worker, or change its role. Raises LaunchError, AioRpcError."""
        launcher = self._launcher
        if launcher is None or (next_role and not launcher.keeps_roles):
            await self._drain(address, next_role)
            return
        name = await _name_of(address, launcher)
        if next_role:  # first, so that the worker stays if nothing can replace it
            await launcher.start(next_role, 1)
        await launcher.drain(name)

    async def _drain(self, address: str, next_role: str) -> None:
        async with open_channel(address, self._access, WORKER_NAME) as channel:
            request = worker_pb2.DrainRequest(next_role=next_role, stay_away=not next_role)
            await worker_pb2_grpc.WorkerStub(channel).Drain(request, timeout=_CALL_S)


async def _name_of(address: str, launcher: WorkerLauncher) -> str:
    for worker in await launcher.list():
        if worker.address == address and worker.stays:
            return worker.name
    raise LaunchError(f"no worker that the launcher has placed is at {address}")
