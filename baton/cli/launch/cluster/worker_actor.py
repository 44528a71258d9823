"""A Ray actor that owns the process of one worker on its node: it restarts the process when it dies, and drains it at
the end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray

from baton.cli.launch.placing.keeper import Keeper, Life
from baton.cli.launch.placing.launcher import WorkerProgram
from baton.cli.launch.placing.ports import HeldPorts
from baton.service.settings import variable


class Where(NamedTuple):
    node_id: str
    host: str
    address: str  # of the worker


class WorkerActor:
    """Starts one worker and reports its state; only small values pass through Ray. The process is a child of the actor
    and dies with it, and the actor dies with its node's raylet."""

    def __init__(self) -> None:
        self._life, self._num_lives = Life("starting"), 0
        self._changed = asyncio.Event()
        self._keeper: Keeper | None = None
        self._ports = HeldPorts()

    async def begin(
        self, name: str, role: str, program: WorkerProgram, gateways: Sequence[str], env: Mapping[str, str]
    ) -> Where:
        """Start the worker at a port that it keeps across restarts. `env` is added to the variables that Ray sets."""
        host = ray.util.get_node_ip_address()
        address = self._ports.hold(f"[{host}]:0" if ":" in host else f"{host}:0")  # held until this process ends
        argv = [sys.executable, *program.argv(role, address, gateways)]
        self._keeper = Keeper(name, argv, env, self._note)
        return Where(ray.get_runtime_context().get_node_id(), host, address)

    async def life_after(self, num_seen: int) -> tuple[int, Life]:
        """Wait until the worker's state has a number other than `num_seen`; return that number and the state."""
        while self._num_lives == num_seen:
            await self._changed.wait()
        return self._num_lives, self._life

    async def ping(self) -> None:
        """Return immediately, as a sign of life."""

    async def drain(self, most_s: float) -> bool:
        """Send SIGTERM, and SIGKILL after `most_s`; return whether the worker ended by itself."""
        return self._keeper is None or await self._keeper.stop(most_s)

    def _note(self, life: Life) -> None:
        self._life, self._num_lives = life, self._num_lives + 1
        self._changed.set()
        self._changed = asyncio.Event()


def settings_env() -> dict[str, str]:
    """Return the variables of this process that are settings of Baton."""
    prefix = variable("")
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}
