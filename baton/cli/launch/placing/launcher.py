"""The interface between a stack and what places its workers: processes of this machine, Ray actors or Kubernetes pods.

Neither tokens nor KV pass through it, and serving a request does not need it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

DRAIN_S = 15.0  # for a worker with the default grace: longer than its own limit, so only a worker that hangs is killed
MAX_WORKERS = 4096  # as many as may register with a gateway


class LaunchError(Exception):
    """A launcher cannot do what was asked; one line."""


class PlacedWorker(NamedTuple):
    """A worker as its launcher knows it. `state`: starting, serving, lost (its place is filled again, as after a drain
    that an operator asked for), draining (it will be gone), or failed (it ended at its first start, for `reason` and
    with `exit_status`, and is not retried)."""

    name: str
    role: str
    state: str
    address: str = ""  # of its gRPC port; empty until it is known
    where: str = ""  # host, node or pod
    reason: str = ""
    exit_status: int = 0
    model: str = ""  # the name under which its model is served; empty if the stack has one model without a name

    @property
    def stays(self) -> bool:
        """Whether the worker counts towards the wanted number of its role."""
        return self.state not in ("draining", "failed")


class WorkerLauncher(Protocol):
    """Places workers, keeps each place filled, and empties places. Its methods raise LaunchError."""

    keeps_roles: bool  # a place belongs to one role: its worker cannot change to the other

    async def start(self, role: str, number: int) -> None:
        """Begin to start `number` more workers."""
        ...

    async def drain(self, name: str) -> None:
        """Begin to drain a worker: its requests end or move to others, then its process is stopped and stays away."""
        ...

    async def list(self) -> list[PlacedWorker]: ...

    def watch(self) -> AsyncIterator[list[PlacedWorker]]:
        """Yield the list now, and after each change."""
        ...


async def scale(launcher: WorkerLauncher, role: str, number: int) -> None:
    """Start or begin to drain workers until `role` has `number` of them, over all models. Workers of the model with the
    most are drained first: those that do not serve, then the youngest."""
    placed = await launcher.list()
    num_models = len({worker.model for worker in placed})
    if role == "decode" and number < num_models and num_models > 1:
        raise LaunchError(f"decode={number}: {num_models} models are served, and each needs a decode worker")
    staying = [worker for worker in placed if worker.role == role and worker.stays]
    if number > len(staying):
        await launcher.start(role, number - len(staying))
    staying.reverse()
    while len(staying) > number:
        num_of = Counter(worker.model for worker in staying)
        leaving = min(staying, key=lambda worker: (-num_of[worker.model], worker.state == "serving"))
        await launcher.drain(leaving.name)
        staying.remove(leaving)


class Resources(NamedTuple):
    """What a cluster reserves for one worker with all its ranks."""

    num_cpus: int = 1
    num_gpus: int = 0


@dataclass(frozen=True)
class WorkerProgram:
    """The command line of a worker, wherever it is placed. `options` are flags by role. `drain_s` says by role how long
    a worker may drain before it is killed (default: DRAIN_S). `model_name` is that of PlacedWorker."""

    model: Path
    options: Mapping[str, Sequence[str]]
    drain_s: Mapping[str, float] = field(default_factory=dict)
    model_name: str = ""

    def argv(self, role: str, listen: str, gateways: Sequence[str], own: Sequence[str] = ()) -> list[str]:
        """Return the arguments for Python. The worker registers with `gateways`; `own` are the flags of its place."""
        return ["-m", f"{role}_worker", *self.options_of(role, listen, gateways, own)]

    def options_of(self, role: str, listen: str, gateways: Sequence[str] = (), own: Sequence[str] = ()) -> list[str]:
        """Return the flags of the worker, including `own`."""
        argv = ["--model", str(self.model), "--listen", listen]
        # These variables are not for workers: BATON_GATEWAYS says how many gateways `baton up` starts, and BATON_ADMIN
        # is the gateway's.
        argv += ["--gateways", ",".join(gateways), "--admin", "127.0.0.1:0"]
        return [*argv, *own, *self.options.get(role, ())]


class WorkerBoard:
    """The workers of a launcher by name, oldest first, and the coroutines that wait for changes. Belongs to the event
    loop."""

    def __init__(self) -> None:
        self._workers: dict[str, PlacedWorker] = {}
        self._changed = asyncio.Event()
        self._num_named: dict[str, int] = {}

    def new_name(self, role: str) -> str:
        """Return a name that no worker has had."""
        number = self._num_named[role] = self._num_named.get(role, -1) + 1
        return f"{role} worker {number}"

    def add(self, worker: PlacedWorker) -> None:
        """Add a worker, and forget the failed ones of its role."""
        for name in [
            name for name, each in self._workers.items() if each.state == "failed" and each.role == worker.role
        ]:
            del self._workers[name]
        self._workers[worker.name] = worker
        self._notify()

    def change(self, name: str, **fields) -> None:
        """Set fields of a worker, if it is known."""
        if name in self._workers:
            self._workers[name] = self._workers[name]._replace(**fields)
            self._notify()

    def remove(self, name: str) -> None:
        if self._workers.pop(name, None):
            self._notify()

    def get(self, name: str) -> PlacedWorker:
        """Return a worker. Raises LaunchError."""
        if name not in self._workers:
            raise LaunchError(f"there is no worker {name!r}")
        return self._workers[name]

    def list(self) -> list[PlacedWorker]:
        return [*self._workers.values()]

    async def watch(self) -> AsyncIterator[list[PlacedWorker]]:
        while True:
            changed = self._changed
            yield [*self._workers.values()]
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
