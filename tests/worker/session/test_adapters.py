"""Adapters that come while the worker runs: read one at a time, and told to every gateway."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.service.errors import InvalidRequest
from baton.v1 import worker_pb2 as pb
from baton.worker.session.adapters import LiveAdapters
from baton.worker.session.session import WorkerService
from baton.worker.session.sessions import Sessions
from baton.worker.wire.outbox import Outbox
from tests.support.pace import patience


class Reader:
    """An engine that has read an adapter when the test says so."""

    def __init__(self, root: Path):
        self.config = SimpleNamespace(adapter_root=root)
        self.adapters = self
        self.may_read, self.reading, self.known = threading.Event(), [], {}

    def add_adapter(self, name: str, folder: Path) -> bytes:
        self.reading.append(name)
        assert self.may_read.wait(patience(10))
        self.known[name] = folder.name.encode()
        return self.known[name]

    def listed(self) -> dict[str, bytes]:
        return self.known


class Bench:
    def __init__(self, root: Path):
        self.engine: Any = Reader(root)
        self.sessions, self.hello = Sessions(self.engine), pb.Hello()
        self.adapters = LiveAdapters(self.engine, self.sessions, self.hello)


async def until(condition) -> None:
    async with asyncio.timeout(patience(10)):
        while not condition():
            await asyncio.sleep(0.001)


def names(hello: pb.Hello) -> list[str]:
    return [adapter.name for adapter in hello.adapters]


async def test_what_was_read_is_told_though_its_call_was_given_up(tmp_path):
    bench = Bench(tmp_path)
    outbox = Outbox(write=None)
    bench.sessions.open(b"gateway", outbox)
    given_up = asyncio.create_task(bench.adapters.load("first", "a"))
    await until(lambda: bench.engine.reading)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    second = asyncio.create_task(bench.adapters.load("second", "b"))
    await asyncio.sleep(0.05)
    assert bench.engine.reading == ["first"], "one is read at a time"
    bench.engine.may_read.set()
    assert await second == b"b"
    assert names(bench.hello) == ["first", "second"] and outbox.num_unwritten == 2


class Context:
    """A call whose gateway reads when the test says so."""

    def __init__(self):
        self.reads, self.events = asyncio.Event(), []

    def peer(self) -> str:
        return "gateway"

    async def write(self, event: pb.Event) -> None:
        said = pb.Event()
        said.CopyFrom(event)
        await self.reads.wait()
        self.events.append(said)


async def test_a_gateway_that_is_being_greeted_is_told(tmp_path):
    bench, context = Bench(tmp_path), Context()
    bench.engine.may_read.set()
    commands: Any = SimpleNamespace(on_read=None, on_stream_lost=lambda outbox: None)
    service = WorkerService(commands, bench.sessions, None, bench.adapters, bench.hello)

    async def sent():
        yield pb.Command(hello=pb.Hello(protocol_min=1, protocol_max=1, instance=b"gateway"))
        await asyncio.Event().wait()

    session = asyncio.create_task(service.Session(sent(), context))
    await asyncio.sleep(0.05)
    await bench.adapters.load("bot", "a")
    context.reads.set()
    await until(lambda: context.events and names(context.events[-1].hello) == ["bot"])
    assert names(context.events[0].hello) == []
    session.cancel()
    await asyncio.gather(session, return_exceptions=True)


@pytest.mark.parametrize("path", ["a\0b", "circle/a"])
async def test_a_path_that_is_none_is_the_callers_fault(tmp_path, path):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InvalidRequest, match="path"):
        await Bench(tmp_path).adapters.load("bot", path)
