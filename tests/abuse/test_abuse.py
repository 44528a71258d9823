"""Every port, every abuse, from every caller that reaches it: no other caller is affected, and nothing of it stays.

50 connections, or 50 calls of each method of a port, all together: each abuse at one port of those that speak alike,
one at all ports. In `make test-long` every abuse at every port, 10,000 calls, the methods in turn."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
import pytest_asyncio

from tests.support.abuse.attacked_stack import LARGE, AttackedStack, Attackers, attacked, few_descriptors
from tests.support.abuse.catalogue import ABUSES, HTTP, PORTS, TENANT, Cell, cells, is_chosen
from tests.support.fork_server.processes import ForkServer

# How an attacker may be answered: never INTERNAL or UNKNOWN, which are our own faults.
HONEST = (
    "OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "CANCELLED", "UNIMPLEMENTED", "UNAVAILABLE", "FAILED_PRECONDITION", "reset", "goaway", "hung up", "no room", "turned away",
    *(f"HTTP {status}" for status in (200, 400, 401, 404, 405, 408, 413, 422, 429, 431, 503, 504)),
    "protocol_error", "ticket_refused",
)  # fmt: skip


class AttackedStacks:
    """One stack at a time: cells come ordered by the one that they need."""

    def __init__(self, model: Path, make_folder: Callable[[str], Path], fork_server: ForkServer):
        """`fork_server`: its children may have few descriptors."""
        self._model, self._make_folder, self._fork_server = model, make_folder, fork_server
        self._standing: AttackedStack | None = None

    def __call__(self, kv: str) -> AttackedStack:
        if self._standing is None or self._standing.kv != kv:
            self.close()
            self._standing = AttackedStack(
                self._model, self._make_folder(f"stack-{kv}"), kv, self._fork_server
            ).__enter__()
        return self._standing

    def close(self) -> None:
        if self._standing is not None:
            self._standing.__exit__()
            self._standing = None


@pytest.fixture(scope="module")
def stacks(model, tmp_path_factory):
    with few_descriptors():
        fork_server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    with fork_server:
        stacks = AttackedStacks(model, tmp_path_factory.mktemp, fork_server)
        yield stacks
        stacks.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def attackers():
    async with Attackers(2) as attackers:
        yield attackers


def test_every_listening_port_has_its_row(stacks):
    stack = stacks("shm")
    for name in ("gateway0", "prefill0"):
        process = stack.process(name)
        listening = {
            each.laddr.port
            for each in psutil.Process(process.pid).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        rows = [stack.address(port) for port in PORTS.values() if port.process == name and port.speaks]
        assert listening == {int(address.rpartition(":")[2]) for address in rows if address[-1].isdigit()}, name


def test_every_kv_transport_has_its_row(stacks):
    stack = stacks("shm")
    rows = {port.where for port in PORTS.values() if port.name.startswith("KV")}
    assert stack.endpoints.keys() - {"inproc"} <= rows and {"shm", "tcp", "grpc"} <= stack.endpoints.keys()


@pytest.mark.parametrize("port", [port for port in PORTS.values() if port.speaks == HTTP], ids=lambda port: port.name)
def test_every_page_has_its_row(stacks, port):
    address = stacks("shm").address(port)
    with pytest.raises(HTTPError) as caught:
        urlopen(f"http://{address}/what-is-there", timeout=10)
    told = json.loads(caught.value.read())["error"].removeprefix("here are ").split(", ")
    assert sorted(told) == sorted(method.path for method in port.methods)


@pytest.mark.asyncio(loop_scope="module")
async def test_attacks_arrive(stacks, attackers):
    """Each call is answered, of each method; else the rest would prove nothing."""
    cell = Cell(PORTS["client"], ABUSES["empty calls"], TENANT, PORTS["client"].methods)
    outcomes = (await attacked(await ready(stacks, cell), attackers, cell, 200 * len(cell.methods))).outcomes
    assert {outcome.split()[0] for outcome in outcomes} == {method.path.rpartition("/")[2] for method in cell.methods}
    assert outcomes.total() == 200 * len(cell.methods)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cell", list(filter(is_chosen, cells())), ids=str)
async def test_50_attackers_a_method_go_unnoticed(stacks, attackers, cell, record_property):
    count = 50 if cell.abuse.calls == 1 else 50 * len(cell.methods)
    await nobody_else_notices(stacks, attackers, cell, count, record_property)


@pytest.mark.long
@pytest.mark.alone  # beside two processes of tests, others waited 60 s during attacks that take 26 s by themselves
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cell", list(cells()), ids=str)
async def test_10_000_attackers_go_unnoticed(stacks, attackers, cell, record_property):
    """Or as many connections as a port takes: it has a third of the descriptors, and there are no bounds by address."""
    port_takes = resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 3 - 500
    count = min(LARGE, port_takes) if cell.abuse.calls == 1 else LARGE
    await nobody_else_notices(stacks, attackers, cell, count, record_property)


async def ready(stacks: AttackedStacks, cell: Cell) -> AttackedStack:
    """The stack that the cell needs, warm."""
    stack = stacks(cell.port.kv)
    if not stack.alone_s:
        await stack.warm()
    return stack


async def nobody_else_notices(
    stacks: AttackedStacks, attackers: Attackers, cell: Cell, count: int, record_property
) -> None:
    seen = await attacked(await ready(stacks, cell), attackers, cell, count)
    record_property("abuse", json.dumps(seen.row()))
    allowed = (*HONEST, *cell.abuse.answers)
    dishonest = [f"the attacker received {outcome!r}" for outcome in seen.outcomes if not outcome.endswith(allowed)]
    assert not seen.faults + dishonest, f"{seen.faults[:10]} {dishonest} {dict(seen.outcomes)}"
