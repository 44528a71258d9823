"""The stack under attack: one with TLS, certificates by role and two tenants, and processes that attack it."""

import asyncio
import json
import resource
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from baton.cli.cluster.certs import CREDENTIALS, SECRET
from baton.service.security.credentials import new_key
from baton.service.security.tls import WORKER_NAME
from baton.v1 import worker_pb2, worker_pb2_grpc
from kvtransfer.transports.socket_folder import default_parent, socket_path
from tests.support.abuse.bystander import GENERATES, Bystander
from tests.support.abuse.catalogue import FLOOD_TENANT, GRPC, HTTPS, QUIET_TENANT, Caller, Cell, Port
from tests.support.abuse.levels import levels, stayed
from tests.support.fork_server.processes import ForkServer
from tests.support.process import ROOT, Process
from tests.support.security.installation import API_KEY, install
from tests.support.stack import Stack

# Smaller than the least attack: what is held to all of them together is held to, in the test of a minute too.
GATEWAY_OPTIONS = (
    "--max-concurrent-requests", "64", "--max-queued-requests", "48", "--split", "always", "--reflection",
    "--fleet-listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
)  # fmt: skip
WORKER_OPTIONS = ("--num-blocks", "160", "--threads", "1", "--reflection")
FLOOD_KEY = "flood-key"  # the file of the flooding tenant's key
DESCRIPTOR_LIMIT = 256  # that processes may have until they ask for more, as of many shells 1,024
LARGE = 10_000  # calls
# Of every call of the bystander: what is lost, not what is slow on a busy machine. To refuse a call takes the gateway
# up to a millisecond, and calls are taken in the order in which they come.
DEADLINE_S, LARGE_DEADLINE_S = 30.0, 60.0
MEMORY_MIB, LARGE_MEMORY_MIB = 24, 128  # that may stay: allocators keep some of what they had
BACK_S, RECOVERY_S = 8.0, 60.0
ATTACKER_TIMEOUT_S = 600.0  # for an attacker


class AttackedStack:
    """`with`: the stack runs. `kv`: the transport that its KV takes; doors of the others are open all the same."""

    def __init__(self, model: Path, folder: Path, kv: str, fork_server: ForkServer | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.kv = kv
        self._made = made = install(folder / "certs", "--tenant", QUIET_TENANT)
        key, key_id, digest = new_key()
        with (made.folder / CREDENTIALS).open("a") as file:
            file.write(f'[keys.{key_id}]\ntenant = "{FLOOD_TENANT}"\nsha256 = "{digest}"\n')
        (made.folder / FLOOD_KEY).write_text(key)
        gateway = (*made.tls_options("gateway"), "--credentials", made.folder / CREDENTIALS,
                   "--cluster-secret", made.folder / SECRET, *GATEWAY_OPTIONS)  # fmt: skip
        self.stack = Stack(
            model, folder / "stack", options=WORKER_OPTIONS,
            prefill_options=made.tls_options("prefill"),
            decode_options=[*made.tls_options("decode"), "--transports", kv],
            gateway_options=[str(word) for word in gateway], fork_server=fork_server,
        )  # fmt: skip
        self.endpoints: dict[str, str] = {}
        self.alone_s: dict[str, float] = {}  # the bystander's times without an attack

    def __enter__(self) -> "AttackedStack":
        with few_descriptors():
            self.stack.__enter__()
        try:
            hello = self._describe(self.process("prefill0"))
            self.endpoints = {each.transport: each.address for each in hello.endpoints}
        except BaseException:
            self.stack.kill()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self.stack.stop()

    async def warm(self) -> None:
        """Let the bystander ask alone: what is allocated once is there, and how long its calls take is known."""
        async with self.bystander() as bystander:
            await bystander.rounds(10)
            bystander.times_s.clear()
            await bystander.rounds(20)
        assert not bystander.faults, bystander.faults
        self.alone_s = {part: bystander.median(part) for part in bystander.times_s}

    async def recovered(self) -> None:
        """Wait until the bystander has a whole round without a fault."""
        async with asyncio.timeout(RECOVERY_S), self.bystander() as bystander:
            while bystander.faults:
                bystander.faults.clear()
                await bystander.rounds(1)

    def process(self, name: str) -> Process:
        return next(process for process in self.stack.processes if process.name == name)

    def bystander(self, deadline_s: float = DEADLINE_S) -> Bystander:
        gateway = self.process("gateway0").ready()
        pages = [process.ready()["admin"] for process in self.stack.processes]
        tenant, operator = self._made.access(key=API_KEY), self._made.access("operator")
        return Bystander(gateway["grpc"], gateway["fleet"], pages, tenant, operator, deadline_s)

    def address(self, port: Port) -> str:
        """Return host:port, or the path of a socket."""
        if port.where in self.endpoints and port.name.startswith("KV"):
            return self.endpoints[port.where]
        return self.process(port.process).ready()[port.where]

    def order(self, cell: Cell, count: int, source: str) -> dict:
        """Return what an attacker is told to do."""
        port, caller = cell.port, cell.caller
        shm = port.where == "shm"
        return {
            "abuse": cell.abuse.name, "count": count, "speaks": port.speaks, "address": self.address(port),
            "unix": socket_path(default_parent(), self.address(port)) if shm else "", "source": source,
            "tls": port.speaks in (GRPC, HTTPS),
            "certificate": self._pair(caller.certificate) if caller.certificate else None,
            "metadata": self._metadata(caller), "methods": [(path, message.hex()) for path, message in cell.methods],
        }  # fmt: skip

    def _pair(self, role: str) -> list[str]:
        return [str(self._made.folder / f"{role}.{end}") for end in ("crt", "key")]

    def _metadata(self, caller: Caller) -> list[list[str]]:
        return [list(each) for each in self._made.access(key=FLOOD_KEY).metadata] if caller.key else []

    def _describe(self, worker: Process) -> worker_pb2.Hello:
        with self._made.access("operator").channel(worker.ready()["grpc"], name=WORKER_NAME, blocking=True) as channel:
            return worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=30)


class Attackers:
    """`count` processes, each from an address of its own, none of which is the bystander's."""

    def __init__(self, count: int):
        self._count = count
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> "Attackers":
        for _ in range(self._count):
            argv = ("setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "tests.support.abuse.attacker")
            process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, cwd=ROOT)
            self._processes.append(process)
        return self

    async def __aexit__(self, *exc) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def hold(self, target: AttackedStack, cell: Cell, count: int) -> None:
        """Attack, and wait until everything is sent."""
        for index, process in enumerate(self._processes):
            order = target.order(cell, count // self._count, f"127.0.0.{2 + index}")
            process.stdin.write(json.dumps(order).encode() + b"\n")
        for process in self._processes:
            await self._said(process, "held")

    async def let_go(self) -> Counter[str]:
        """End the attack, and return counts of its outcomes."""
        outcomes: Counter[str] = Counter()
        for process in self._processes:
            process.stdin.write(b"{}\n")
        for process in self._processes:
            outcomes.update((await self._said(process, "outcomes"))["outcomes"])
        return outcomes

    async def _said(self, process: asyncio.subprocess.Process, what: str) -> dict:
        async with asyncio.timeout(ATTACKER_TIMEOUT_S):
            said = json.loads(await process.stdout.readline() or "{}")
        assert what in said, f"an attacker ended with {process.returncode}"
        return said


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Let processes that are started meanwhile have DESCRIPTOR_LIMIT, as long as they do not ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTOR_LIMIT, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass(frozen=True)
class AbuseResult:
    """Results of one cell. `ratio`: the tenant's worst time over its time alone, of that of its calls (`part`) where it
    is the largest."""

    cell: Cell
    part: str
    ratio: float
    mib: float
    faults: list[str]
    outcomes: Counter[str]

    def row(self) -> dict:
        names = {"port": self.cell.port.name, "abuse": self.cell.abuse.name, "caller": self.cell.caller.name}
        return names | {"ratio": round(self.ratio, 1), "mib": round(self.mib, 1)}


async def attacked(target: AttackedStack, attackers: Attackers, cell: Cell, count: int) -> AbuseResult:
    """Attack while the bystander asks all along, and at least twice while the attack is at its height. What fails is
    tried once more: what locks out does so again and what leaks leaks again, while an allocator keeps memory that it
    needed once, and a machine that was frozen for seconds ended sessions by itself. No process is ever gone, and none
    logs a fault."""
    num_complaints = len(target.stack.complaints())
    seen = await _attacked(target, attackers, cell, count)
    if seen.faults:
        await target.recovered()
        seen = await _attacked(target, attackers, cell, count)
    gone = [f"{process.name} is gone" for process in target.stack.processes if not process.alive]
    return replace(seen, faults=[*seen.faults, *gone, *target.stack.complaints()[num_complaints:]])


async def _attacked(target: AttackedStack, attackers: Attackers, cell: Cell, count: int) -> AbuseResult:
    processes, is_large = target.stack.processes, count > LARGE // 2
    tolerance_mib, deadline_s = (LARGE_MEMORY_MIB, LARGE_DEADLINE_S) if is_large else (MEMORY_MIB, DEADLINE_S)
    async with target.bystander(deadline_s) as bystander:
        before = await asyncio.to_thread(levels, processes)
        await attackers.hold(target, cell, count)
        await bystander.rounds(2)
        outcomes = await attackers.let_go()
        await bystander.rounds(1)
        left = await asyncio.to_thread(stayed, processes, before, tolerance_mib, BACK_S)
    ratio, part = max((bystander.worst(part) / target.alone_s[part], part) for part in GENERATES)
    return AbuseResult(cell, part, ratio, left.mib, [*bystander.faults, *left.faults], outcomes)
