"""Adapters that come while the worker runs: read one at a time, and told to every gateway."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.core.model_errors import ModelError
from baton.service.errors import InvalidRequest, NotFound
from baton.v1 import worker_pb2 as pb
from baton.worker.session.adapter_records import FOLDER
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
        self.model_name, self.model_identity = "chat", b"weights"
        self.may_read, self.reading, self.known = threading.Event(), [], {}

    def add_adapter(self, name: str, folder: Path) -> bytes:
        self.reading.append(name)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder")
        assert self.may_read.wait(patience(10))
        self.known[name] = folder.name.encode()
        return self.known[name]

    def remove(self, name: str) -> bool:
        return self.known.pop(name, None) is not None

    def listed(self) -> dict[str, bytes]:
        return self.known


class Bench:
    def __init__(self, root: Path, **model):
        self.engine: Any = Reader(root)
        vars(self.engine).update(model)
        self.sessions, self.hello = Sessions(self.engine), pb.Hello()
        self.adapters = LiveAdapters(self.engine, self.sessions, self.hello)


@pytest.fixture
def root(tmp_path) -> Path:
    for name in "ab":
        (tmp_path / name).mkdir()
    return tmp_path


def ready(root: Path, **model) -> Bench:
    """A worker that reads at once."""
    bench = Bench(root, **model)
    bench.engine.may_read.set()
    return bench


async def restored(root: Path, **model) -> dict[str, bytes]:
    """What a worker holds that starts now."""
    bench = ready(root, **model)
    await bench.adapters.restore()
    assert names(bench.hello) == list(bench.engine.known)
    return bench.engine.known


async def until(condition) -> None:
    async with asyncio.timeout(patience(10)):
        while not condition():
            await asyncio.sleep(0.001)


def names(hello: pb.Hello) -> list[str]:
    return [adapter.name for adapter in hello.adapters]


async def test_what_was_read_is_told_though_its_call_was_given_up(root):
    bench = Bench(root)
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


async def test_a_gateway_that_is_being_greeted_is_told(root):
    bench, context = Bench(root), Context()
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


async def test_a_worker_that_starts_later_holds_what_was_loaded_and_not_unloaded(root):
    first, second = ready(root).adapters, ready(root).adapters
    for worker in (first, second):
        await worker.load("bot", "a")
        await worker.load("fleeting", "a")
    await first.load("bot", "b")
    await first.unload("fleeting")
    assert await restored(root) == {"bot": b"b"}
    await second.unload("fleeting")
    assert await restored(root) == {"bot": b"b"}


async def test_what_another_model_holds_is_not_restored(root):
    await ready(root).adapters.load("bot", "a")
    assert await restored(root, model_name="code") == {}
    assert await restored(root, model_identity=b"newer weights") == {}


@pytest.mark.parametrize("name", ["org/" + "語" * 124, "..", "a.json"])
async def test_any_name_is_restored(root, name):
    await ready(root).adapters.load(name, "a")
    assert await restored(root) == {name: b"a"}


async def test_what_cannot_be_restored_is_logged_and_its_record_goes_with_unload(root, caplog):
    bench = ready(root)
    await bench.adapters.load("bot", "a")
    await bench.adapters.load("gone", "b")
    (root / "b").rmdir()
    assert await restored(root) == {"bot": b"a"}
    assert "an adapter that was loaded before is not held" in caplog.text and "name=gone" in caplog.text
    await ready(root).adapters.unload("gone")
    with pytest.raises(NotFound):
        await ready(root).adapters.unload("gone")


async def test_records_lead_to_nothing_beyond_the_root(root, tmp_path_factory, caplog):
    bench = ready(root)
    await bench.adapters.load("bot", "a")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for index, path in enumerate((elsewhere, "../elsewhere", 3)):
        record = {"model": "chat", "identity": b"weights".hex(), "name": f"x{index}", "path": path}
        (root / FOLDER / f"{index}.json").write_text(json.dumps(record, default=str))
    (root / FOLDER / "half.json").write_text('{"model": ')
    assert await restored(root) == {"bot": b"a"}
    assert caplog.text.count("is not below --adapter-root") == 2


async def test_what_cannot_be_recorded_is_loaded_all_the_same(root, caplog):
    (root / FOLDER).write_text("a file where the folder belongs, for want of a disk without room")
    bench = ready(root)
    assert await bench.adapters.load("bot", "a") == b"a"
    assert "workers that start later will not hold this adapter" in caplog.text
    await bench.adapters.unload("bot")
    assert names(bench.hello) == []
