"""A stack: gateways on this machine, and workers where a launcher places them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from baton.cli.launch.control import DEFAULT_ADDRESS, ControlServer
from baton.cli.launch.placing.keeper import Keeper, StartError
from baton.cli.launch.placing.launcher import Resources, WorkerLauncher, WorkerProgram
from baton.cli.launch.placing.local import LocalLauncher
from baton.cli.launch.placing.log import flush
from baton.cli.launch.placing.ports import HeldPorts
from baton.cli.launch.stacks import StackNote
from baton.protocol import ROLES, model_setting
from baton.service.net.server import AddressInUse
from baton.service.security.access import Access
from baton.service.security.tls import Tls

_BATON = Path(__file__).resolve().parents[2]
_IN_WHEEL, _IN_CHECKOUT = _BATON / "shipped" / "target", _BATON.parent / "demo" / "target"
SHIPPED_MODEL = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT


@dataclass(frozen=True)
class StackPlan:
    """A stack to run. `models` are by name, None for a single one; each has `num_workers`. `worker_options` are flags
    by role, `gateway_options` flags of the gateways; workers of `cpu_roles` take no GPU."""

    models: Mapping[str | None, Path]
    listen: str = "127.0.0.1:0"
    num_workers: Mapping[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    worker_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gateway_options: Sequence[str] = ()
    # Variables of the gateways only: other users can read command lines.
    gateway_env: Mapping[str, str] = field(default_factory=dict)
    num_gateways: int = 1
    cpu_roles: Collection[str] = ()
    http: str | None = None  # of the first gateway; the system chooses the others' ports
    fleet_listen: str | None = None  # likewise; with certificates workers register there, else at `listen`
    control: str | None = None  # where operators scale the stack; None: control.DEFAULT_ADDRESS if it is free
    access: Access = Access()  # for calls to workers, with the certificate of the control port
    ray_address: str | None = None  # of the Ray cluster that has the workers; None: this machine
    resources: Mapping[str, Resources] = field(default_factory=dict)  # of one worker, by role
    together: bool = False  # gateway and worker are one process
    # Seconds from SIGTERM to SIGKILL, longer than processes give themselves, so only one that hangs is killed.
    # `drain_s` is by role of a worker (default: launcher.DRAIN_S).
    drain_s: Mapping[str, float] = field(default_factory=dict)
    gateway_drain_s: float = 40.0

    @property
    def num_placed(self) -> Mapping[str, int]:
        """How many workers of each model a launcher places, by role."""
        return dict.fromkeys(ROLES, 0) if self.together else self.num_workers


class PlacingLauncher(WorkerLauncher, Protocol):
    """A launcher whose workers end with this process."""

    networks: Sequence[str]  # of the workers beyond this host

    async def close(self) -> bool:
        """Drain all workers; return whether none had to be killed."""
        ...

    async def kill(self) -> None:
        """Kill all workers immediately."""
        ...


class Stack:
    """A running stack: `fields = await stack.start()`, then `await stack.drain()`, or `stack.kill()` to end it
    immediately."""

    def __init__(self, plan: StackPlan):
        self._plan = plan
        self._ports = HeldPorts()
        self._gateways: list[Keeper] = []
        self._launcher: PlacingLauncher | None = None
        self._control: ControlServer | None = None
        self._note: StackNote | None = None

    async def start(self) -> dict[str, str]:
        """Start all processes in parallel. Once all serve, return the fields of the first gateway's ready line, with
        `control`, the addresses of all `gateways` if there are several, and `gpus` (used/available). Raises PortError,
        ListenError, or keeper.StartError if a process ends before it is ready."""
        plan = self._plan
        listens = self._hold_each(plan.listen)
        https = self._hold_each(plan.http) if plan.http else [None] * plan.num_gateways
        fleets = self._hold_each(plan.fleet_listen) if plan.fleet_listen else [None] * plan.num_gateways
        gateways = [fleet or listen for fleet, listen in zip(fleets, listens, strict=True)]
        launcher = self._launcher = self._make_launcher(gateways)
        for role in ROLES:
            await launcher.start(role, plan.num_placed[role] * len(plan.models))
        named = {
            role: [each.address for each in await launcher.list() if each.role == role and each.address]
            for role in ROLES
        }
        self._gateways = [
            Keeper(*self._gateway_program(n, *ports, named), plan.gateway_env)
            for n, ports in enumerate(zip(listens, https, fleets, strict=True))
        ]
        control = await self._serve_control(launcher)
        await self._all_or_first_failure(launcher)
        fields = {**self._gateways[0].started.result(), "control": control}
        if isinstance(launcher, LocalLauncher) and launcher.gpus.num_used:
            fields["gpus"] = f"{launcher.gpus.num_used}/{launcher.gpus.num_gpus}"
        if len(listens) > 1:
            fields["gateways"] = ",".join(listens)
        return fields

    async def drain(self) -> bool:
        """Drain the gateways first, so that running streams end well, then the workers. Return False if one had to be
        killed."""
        await self._stop_control()
        well = list(await asyncio.gather(*(gateway.stop(self._plan.gateway_drain_s) for gateway in self._gateways)))
        well.append(self._launcher is None or await self._launcher.close())
        self._ports.release_all()
        flush()
        return all(well)

    async def kill(self) -> None:
        """Send SIGKILL to all processes immediately."""
        await self._stop_control()
        for gateway in self._gateways:
            gateway.kill()
        if self._launcher is not None:
            await self._launcher.kill()
        await asyncio.gather(*(gateway.stop(self._plan.gateway_drain_s) for gateway in self._gateways))
        self._ports.release_all()
        flush()

    def _make_launcher(self, gateways: list[str]) -> PlacingLauncher:
        plan = self._plan
        programs = [_program(name, path, plan) for name, path in plan.models.items()]
        if plan.ray_address is None:
            num_gpus = {role: each.num_gpus for role, each in plan.resources.items()}
            num_first = {role: len(programs) * number for role, number in plan.num_placed.items()}
            return LocalLauncher(programs, gateways, num_first, plan.cpu_roles, num_gpus)
        try:  # imported here, since it takes a second
            from baton.cli.launch.cluster.ray_launcher import RayLauncher
        except ModuleNotFoundError:
            raise StartError("--launcher ray needs Ray: pip install ray", 2) from None
        return RayLauncher(programs[0], gateways, plan.ray_address, plan.resources, plan.access)

    async def _serve_control(self, launcher: WorkerLauncher) -> str:
        """Serve the control port, and return its address. Raises ListenError."""
        cert, key, ca = self._plan.access.tls_cert, self._plan.access.tls_key, self._plan.access.tls_ca
        self._control = ControlServer(launcher, Tls(cert, key, ca) if cert and key and ca else None)
        address = self._plan.control or DEFAULT_ADDRESS
        try:
            port = await self._control.start(address)
        except AddressInUse:
            if self._plan.control:
                raise
            port = await self._control.start("127.0.0.1:0")  # another stack has the default port
        address = f"{address.rpartition(':')[0]}:{port}"
        with contextlib.suppress(OSError):  # otherwise the stack is found by its address only
            self._note = StackNote(address)
        return address

    async def _stop_control(self) -> None:
        if self._note is not None:
            self._note.close()
            self._note = None
        if self._control is not None:
            await self._control.stop()

    async def _all_or_first_failure(self, launcher: WorkerLauncher) -> None:
        workers = asyncio.ensure_future(_all_serve(launcher))
        starts = [workers, *(gateway.started for gateway in self._gateways)]
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for start in done:
                if error := start.exception():
                    await self.kill()
                    raise error
        finally:
            workers.cancel()

    def _gateway_program(
        self, number: int, listen: str, http: str | None, fleet: str | None, named: Mapping[str, list[str]]
    ) -> tuple[str, list[str]]:
        module = "baton.cli.launch.together" if self._plan.together else "gateway"
        argv = [sys.executable, "-m", module, "--model", model_setting(self._plan.models), "--listen", listen]
        argv += ["--http", http] if http else []
        argv += ["--fleet-listen", fleet] if fleet else []
        for role in ROLES:
            if named[role]:
                argv += [f"--{role}-workers", ",".join(named[role])]
        assert self._launcher is not None
        if networks := self._launcher.networks:
            argv += ["--worker-networks", ",".join(networks)]
        argv += self._plan.gateway_options
        if self._plan.together:
            ((name, path),) = self._plan.models.items()
            worker = _program(name, path, self._plan)
            return "gateway and worker", [*argv, "--", *worker.options_of("decode", self._ports.hold("127.0.0.1:0"))]
        return (f"gateway {number}", [*argv, "--admin", "127.0.0.1:0"]) if number else ("gateway", argv)

    def _hold_each(self, address: str) -> list[str]:
        """Reserve an address for each gateway: `address` for the first, other ports of its host for the rest."""
        others = [f"{address.rpartition(':')[0]}:0"] * (self._plan.num_gateways - 1)
        return [self._ports.hold(each) for each in (address, *others)]


def _program(name: str | None, model: Path, plan: StackPlan) -> WorkerProgram:
    named = [] if name is None else ["--served-model-name", name]
    options = {role: [*plan.worker_options.get(role, ()), *named] for role in ROLES}
    return WorkerProgram(model, options, plan.drain_s, name or "")


async def _all_serve(launcher: WorkerLauncher) -> None:
    """Wait until all workers that exist now have served, except those that are drained before. Raises StartError if one
    fails."""
    waiting = {worker.name for worker in await launcher.list()}
    async for workers in launcher.watch():
        waiting &= {worker.name for worker in workers if worker.state != "draining"}
        for worker in workers:
            if worker.state == "failed":
                raise StartError(worker.reason, worker.exit_status)
            if worker.state == "serving":
                waiting.discard(worker.name)
        if not waiting:
            return
