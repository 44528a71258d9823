"""A gateway and its workers on this machine, each a child process that is kept running."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton import system
from baton.cli.launch.gpus import GpuShare, deal_gpus, visible_gpus
from baton.cli.launch.keeper import Keeper
from baton.protocol import ROLES

GATEWAY_DRAIN_S, WORKER_DRAIN_S = 40.0, 15.0  # longer than they give themselves: only what hangs is killed
_BATON = Path(__file__).resolve().parents[2]
_IN_WHEEL, _IN_CHECKOUT = _BATON / "shipped" / "target", _BATON.parent / "demo" / "target"
SHIPPED_MODEL = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT


def divide_cores(num_workers: Mapping[str, int], threads: Mapping[str, int | None]) -> dict[str, int | None]:
    """By role the threads of each of so many workers, or ranks of workers: where `threads` has None, an equal part of the cores that the others leave.

    Two workers with all cores each wait for one another's threads within every product (seen on 2 cores: 32 rows take
    100 times as long). What OMP_NUM_THREADS says, every worker reads itself."""
    if "OMP_NUM_THREADS" in os.environ:
        return dict(threads)
    taken = sum(num_workers[role] * (each or 0) for role, each in threads.items())
    num_sharing = sum(num_workers[role] for role, each in threads.items() if each is None)
    share = max(1, (len(system.cores()) - taken) // max(1, num_sharing))
    return {role: each or share for role, each in threads.items()}


class PortError(Exception):
    """One line: why the address cannot be listened on."""


@dataclass(frozen=True)
class StackPlan:
    """Describe a stack to run. `worker_options` are flags by role, `gateway_options` flags of the gateway; `cpu_roles`
    take no GPU."""

    model: Path
    listen: str = "127.0.0.1:0"
    num_workers: Mapping[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    worker_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gateway_options: Sequence[str] = ()
    num_gateways: int = 1
    cpu_roles: Collection[str] = ()
    http: str | None = None  # of the first gateway; others at ports that the system chooses


class Stack:
    """`fields = await stack.start()`, then `await stack.drain()`; `stack.kill()` ends it at once."""

    def __init__(self, plan: StackPlan):
        self._plan = plan
        self._ports: list[socket.socket] = []
        self._gateways: list[Keeper] = []
        self._workers: list[Keeper] = []

    async def start(self) -> dict[str, str]:
        """All processes in parallel; returns the fields of the first gateway's ready line once all serve, and
        `gateways`, the addresses of all where there are several, and `gpus`, used of those there are. Raises PortError, or keeper.StartError when a process
        ends before it was ready."""
        plan = self._plan
        listens = self._reserve_each(plan.listen)
        https = self._reserve_each(plan.http) if plan.http else [None] * plan.num_gateways
        addresses = {role: [self._reserve("127.0.0.1:0") for _ in range(plan.num_workers[role])] for role in ROLES}
        gpus = visible_gpus()
        shares = deal_gpus(gpus, sum(plan.num_workers[role] for role in ROLES if role not in plan.cpu_roles))
        self._workers = [Keeper(*program) for program in self._worker_programs(addresses, iter(shares))]
        self._gateways = [
            Keeper(*self._gateway_program(n, *ports, addresses))
            for n, ports in enumerate(zip(listens, https, strict=True))
        ]
        await self._all_or_first_failure()
        fields = dict(self._gateways[0].started.result())
        if shares:
            fields["gpus"] = f"{min(len(gpus), len(shares))}/{len(gpus)}"
        if len(listens) > 1:
            fields["gateways"] = ",".join(listens)
        return fields

    async def drain(self) -> bool:
        """Gateways first, so that running streams end well, then the workers. False when one had to be killed."""
        well = list(await asyncio.gather(*(gateway.stop(GATEWAY_DRAIN_S) for gateway in self._gateways)))
        well += await asyncio.gather(*(worker.stop(WORKER_DRAIN_S) for worker in self._workers))
        self._release_ports()
        return all(well)

    async def kill(self) -> None:
        """SIGKILL to all, at once."""
        for keeper in self._keepers():
            keeper.kill()
        await asyncio.gather(*(keeper.stop(WORKER_DRAIN_S) for keeper in self._keepers()))
        self._release_ports()

    def _keepers(self) -> list[Keeper]:
        return [*self._gateways, *self._workers]

    async def _all_or_first_failure(self) -> None:
        starts = [keeper.started for keeper in self._keepers()]
        done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        for start in done:
            if error := start.exception():
                await self.kill()
                raise error

    def _worker_programs(
        self, addresses: Mapping[str, list[str]], shares: Iterator[GpuShare]
    ) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        for role in ROLES:
            options = self._plan.worker_options.get(role, ())
            for index, address in enumerate(addresses[role]):
                # --admin: BATON_ADMIN is the gateway's
                argv = [sys.executable, "-m", f"{role}_worker", "--model", str(self._plan.model), "--listen", address]
                argv += ["--admin", "127.0.0.1:0"]
                share = None if role in self._plan.cpu_roles else next(shares, None)
                if share is not None and share.num_workers > 1:
                    argv += ["--workers-per-gpu", str(share.num_workers)]
                yield f"{role} worker {index}", [*argv, *options], share.env if share else {}

    def _gateway_program(
        self, number: int, listen: str, http: str | None, addresses: Mapping[str, list[str]]
    ) -> tuple[str, list[str]]:
        argv = [sys.executable, "-m", "gateway", "--model", str(self._plan.model), "--listen", listen]
        argv += ["--http", http] if http else []
        for role in ROLES:
            if addresses[role]:
                argv += [f"--{role}-workers", ",".join(addresses[role])]
        argv += self._plan.gateway_options
        return (f"gateway {number}", [*argv, "--admin", "127.0.0.1:0"]) if number else ("gateway", argv)

    def _reserve_each(self, address: str) -> list[str]:
        """Return an address for each gateway: this one, and of its host."""
        others = [f"{address.rpartition(':')[0]}:0"] * (self._plan.num_gateways - 1)
        return [self._reserve(each) for each in (address, *others)]

    def _reserve(self, address: str) -> str:
        """A bound socket that never listens keeps the port ours between two lives of a process, and still lets the
        process itself listen on it. Returns the address with its port number."""
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise PortError(f"{address!r} is not HOST:PORT")
        try:
            family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen(1)
                where = probe.getsockname()
            keep = socket.socket(family, kind)
            self._ports.append(keep)
            keep.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keep.bind(where)
        except OSError as error:
            raise PortError(f"cannot listen on {address}: {error.strerror}") from None
        return f"{host}:{where[1]}"

    def _release_ports(self) -> None:
        for held in self._ports:
            held.close()
