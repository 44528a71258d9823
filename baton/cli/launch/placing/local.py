"""Place workers on this machine: each is a child process with a keeper."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from baton.cli.launch.placing.gpus import GpuShare, GpuSlots, visible_gpus
from baton.cli.launch.placing.keeper import Keeper, Life
from baton.cli.launch.placing.launcher import DRAIN_S, LaunchError, PlacedWorker, WorkerBoard, WorkerProgram
from baton.cli.launch.placing.ports import HeldPorts
from baton.protocol import ROLES
from baton.service.settings import is_in_environment


class _Kept(NamedTuple):
    keeper: Keeper
    address: str
    share: GpuShare | None
    drain_s: float


class LocalLauncher:
    """Gateways know the first workers by their addresses; later ones register with `gateways`."""

    keeps_roles = False

    def __init__(
        self,
        programs: Sequence[WorkerProgram],
        gateways: Sequence[str],
        num_first: Mapping[str, int],
        cpu_roles: Collection[str],
        num_gpus: Mapping[str, int] | None = None,
    ):
        """Make the launcher. A new worker runs the program of the model with the fewest workers of its role.
        `num_first`: workers at the start, by role. Workers of `cpu_roles` take no GPU. `num_gpus`: per worker, by role
        (default: 1)."""
        self.networks: Sequence[str] = ()
        self._programs, self._gateways, self._cpu_roles = programs, gateways, cpu_roles
        self._num_gpus = num_gpus or {}
        self._num_left = sum(num_first.values())
        self._board, self._ports = WorkerBoard(), HeldPorts()
        num_on_gpus = sum(num_first.get(role, 0) * self._num_gpus.get(role, 1) for role in {*ROLES} - {*cpu_roles})
        self.gpus = GpuSlots(visible_gpus() if {*ROLES} - {*cpu_roles} else [], num_on_gpus)
        on_cpus = cpu_roles if self.gpus.num_gpus else ROLES
        self._num_first_on_cpus = sum(num_first.get(role, 0) for role in on_cpus)
        self._kept: dict[str, _Kept] = {}
        self._drains: dict[str, asyncio.Task[bool]] = {}

    async def start(self, role: str, number: int) -> None:
        """Start workers. Also raises PortError."""
        for _ in range(number):
            self._start(role)

    async def drain(self, name: str) -> None:
        self._board.get(name)
        self._begin_drain(name)

    async def list(self) -> list[PlacedWorker]:
        return self._board.list()

    def watch(self) -> AsyncIterator[list[PlacedWorker]]:
        return self._board.watch()

    async def close(self) -> bool:
        """Drain all workers; return whether none had to be killed."""
        for name in [*self._kept]:
            self._begin_drain(name)
        drains = [*self._drains.values()]
        if drains:
            await asyncio.wait(drains)  # does not cancel the drains if it is cancelled: kill() waits for them too
        self._ports.release_all()
        return all(drain.result() for drain in drains)

    async def kill(self) -> None:
        """Send SIGKILL to all workers immediately."""
        for kept in self._kept.values():
            kept.keeper.kill()
        await self.close()

    def _start(self, role: str) -> None:
        address = self._ports.hold("127.0.0.1:0")
        try:
            share = None if role in self._cpu_roles else self.gpus.take(self._num_gpus.get(role, 1))
        except IndexError:
            self._ports.release(address)
            needs = f"a worker of this role needs {count}: " if (count := self._num_gpus.get(role, 1)) > 1 else ""
            raise LaunchError(f"{needs}all {self.gpus.num_gpus} GPUs of this machine have their workers") from None
        is_first, self._num_left = self._num_left > 0, max(0, self._num_left - 1)
        name = self._board.new_name(role)
        own = _sharing("host", max(self._num_first_on_cpus, self._num_on_cpus + 1))
        if share is not None:
            own = _sharing("gpu", share.num_workers) if share.num_workers > 1 else []
        program = self._next_program(role)
        argv = [sys.executable, *program.argv(role, address, () if is_first else self._gateways, own)]
        self._board.add(PlacedWorker(name, role, "starting", address, "this machine", model=program.model_name))
        keeper = Keeper(name, argv, share.env if share else {}, partial(self._note, name))
        self._kept[name] = _Kept(keeper, address, share, program.drain_s.get(role, DRAIN_S))

    @property
    def _num_on_cpus(self) -> int:
        return sum(kept.share is None for kept in self._kept.values())

    def _next_program(self, role: str) -> WorkerProgram:
        num_of = Counter(each.model for each in self._board.list() if each.role == role and each.stays)
        return min(self._programs, key=lambda program: num_of[program.model_name])

    def _note(self, name: str, life: Life) -> None:
        if life.state in ("gone", "failed"):
            self._let_go(name)
        if life.state == "gone":
            self._board.remove(name)
        elif name not in self._drains:
            # the worker may have changed its role
            role = {"role": life.fields["role"]} if "role" in life.fields else {}
            self._board.change(name, state=life.state, reason=life.reason, exit_status=life.status, **role)

    def _begin_drain(self, name: str) -> None:
        if name in self._kept and name not in self._drains:
            self._board.change(name, state="draining")
            # The keeper is passed, since the worker may be released before the task begins.
            drain = self._drain(name, self._kept[name])
            self._drains[name] = asyncio.create_task(drain, name=f"drain {name}")

    async def _drain(self, name: str, kept: _Kept) -> bool:
        well = await kept.keeper.stop(kept.drain_s)
        self._let_go(name)
        self._board.remove(name)
        del self._drains[name]
        return well

    def _let_go(self, name: str) -> None:
        """Free what a worker held that has ended."""
        if kept := self._kept.pop(name, None):
            self.gpus.give_back(kept.share)
            self._ports.release(kept.address)


def _sharing(what: str, num_workers: int) -> list[str]:
    """Return the flag that tells a worker how many workers share its host or GPU; empty if a variable says so, which
    the flag would override."""
    return [] if is_in_environment(f"workers_per_{what}") else [f"--workers-per-{what}", str(num_workers)]
