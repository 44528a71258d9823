"""Adapters that come while the worker runs: read one at a time, and told to every gateway."""

import asyncio
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.core.model_errors import ModelError
from baton.service.errors import InvalidRequest, NotFound
from baton.v1 import worker_pb2 as pb
from baton.worker.session import adapters
from baton.worker.session.adapter_records import FOLDER, AdapterRecords
from baton.worker.session.adapters import LiveAdapters
from baton.worker.session.service import WorkerService
from baton.worker.session.sessions import Sessions
from baton.worker.wire.outbox import Outbox
from tests.support.pace import patience
from tests.support.waiting import until_async


class Reader:
    """An engine that has read an adapter when the test says so."""

    def __init__(self, root: Path):
        self.config = SimpleNamespace(adapter_root=root)
        self.adapters = self
        self.model_name, self.model_identity = "chat", b"weights"
        self.may_read, self.reading, self.known = threading.Event(), [], {}
        self.failures: dict[str, Exception] = {}

    def add_adapter(self, name: str, folder: Path) -> bytes:
        self.reading.append(name)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder")
        if name in self.failures:
            raise self.failures[name]
        assert self.may_read.wait(patience(10))
        self.known[name] = folder.name.encode()
        return self.known[name]

    def remove(self, name: str) -> bool:
        return self.known.pop(name, None) is not None

    def listed(self) -> dict[str, bytes]:
        return dict(self.known)


class AdaptersHarness:
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


def ready(root: Path, **model) -> AdaptersHarness:
    """A worker that reads at once."""
    harness = AdaptersHarness(root, **model)
    harness.engine.may_read.set()
    return harness


async def restored(root: Path, **model) -> dict[str, bytes]:
    """What a worker holds that starts now."""
    harness = ready(root, **model)
    await harness.adapters.restore()
    assert names(harness.hello) == list(harness.engine.known)
    return harness.engine.known


def names(hello: pb.Hello) -> list[str]:
    return [adapter.name for adapter in hello.adapters]


async def test_what_was_read_is_told_though_its_call_was_given_up(root):
    harness = AdaptersHarness(root)
    outbox = Outbox(write=None)
    harness.sessions.open(b"gateway", outbox)
    given_up = asyncio.create_task(harness.adapters.load("first", "a"))
    await until_async(lambda: harness.engine.reading)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    second = asyncio.create_task(harness.adapters.load("second", "b"))
    await asyncio.sleep(0.05)
    assert harness.engine.reading == ["first"], "one is read at a time"
    harness.engine.may_read.set()
    assert await second == b"b"
    assert names(harness.hello) == ["first", "second"] and outbox.num_unwritten == 2


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
    harness, context = AdaptersHarness(root), Context()
    harness.engine.may_read.set()
    dispatcher: Any = SimpleNamespace(on_read=None, on_stream_lost=lambda outbox: None)
    service = WorkerService(dispatcher, harness.sessions, None, harness.adapters, harness.hello)

    async def sent():
        yield pb.Command(hello=pb.Hello(protocol_min=1, protocol_max=1, instance=b"gateway"))
        await asyncio.Event().wait()

    session = asyncio.create_task(service.Session(sent(), context))
    await asyncio.sleep(0.05)
    await harness.adapters.load("bot", "a")
    context.reads.set()
    await until_async(lambda: context.events and names(context.events[-1].hello) == ["bot"])
    assert names(context.events[0].hello) == []
    session.cancel()
    await asyncio.gather(session, return_exceptions=True)


@pytest.mark.parametrize("path", ["a\0b", "circle/a"])
async def test_a_path_that_is_none_is_the_callers_fault(tmp_path, path):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InvalidRequest, match="path"):
        await AdaptersHarness(tmp_path).adapters.load("bot", path)


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


async def test_what_others_load_and_unload_while_a_worker_starts_is_followed(root, monkeypatch):
    """Its notes were read before, and no call reaches it yet."""
    monkeypatch.setattr(adapters, "LOOKS_S", (0.005,) * 100_000)
    await ready(root).adapters.load("early", "a")
    starting, other = ready(root), ready(root)
    await starting.adapters.restore()
    following = asyncio.create_task(starting.adapters.catch_up())
    await other.adapters.load("bot", "a")
    await until_async(lambda: names(starting.hello) == ["early", "bot"])
    await other.adapters.load("bot", "b")
    await until_async(lambda: starting.engine.known == {"early": b"a", "bot": b"b"})
    await other.adapters.unload("bot")
    await until_async(lambda: names(starting.hello) == ["early"])
    await starting.adapters.load("own", "b")
    with monkeypatch.context() as away:
        away.setattr(AdapterRecords, "read", unreadable)
        await asyncio.sleep(0.05)
    await starting.adapters.unload("early")
    await asyncio.sleep(0.05)
    assert names(starting.hello) == ["own"] and starting.engine.reading == ["early", "bot", "bot", "own"]
    following.cancel()


@pytest.mark.parametrize("away", ["a note", "all"])
async def test_notes_that_are_away_for_a_moment_take_no_adapter_away(root, monkeypatch, away):
    """A share that is not mounted has no notes at all, and looks like one where nothing was loaded."""
    monkeypatch.setattr(adapters, "LOOKS_S", (0.005,) * 100_000)
    await ready(root).adapters.load("bot", "a")
    harness = ready(root)
    await harness.adapters.restore()
    following = asyncio.create_task(harness.adapters.catch_up())
    notes = root / ".loaded"
    if away == "all":
        notes.rename(root / "elsewhere")
    else:
        (note,) = notes.iterdir()
        note.rename(root / "elsewhere")
        note.mkdir()  # reading it is an OSError, whoever reads
    await asyncio.sleep(0.1)
    assert names(harness.hello) == ["bot"]
    following.cancel()


async def test_what_could_not_be_read_is_read_at_the_next_look(root, monkeypatch):
    monkeypatch.setattr(adapters, "LOOKS_S", (0.005,) * 100_000)
    await ready(root).adapters.load("bot", "a")
    harness = ready(root)
    harness.engine.failures["bot"] = OSError("the share is slow")
    await harness.adapters.restore()
    assert names(harness.hello) == []
    following = asyncio.create_task(harness.adapters.catch_up())
    del harness.engine.failures["bot"]
    await until_async(lambda: names(harness.hello) == ["bot"])
    following.cancel()


async def test_unloading_that_a_worker_followed_before_it_was_asked_is_done(root):
    """Operators ask one worker after the other."""
    first, second = ready(root), ready(root)
    await first.adapters.load("bot", "a")
    await second.adapters.restore()
    await first.adapters.unload("bot")
    await second.adapters._apply_records()
    await second.adapters.unload("bot")
    with pytest.raises(NotFound):
        await second.adapters.unload("bot")


def unreadable(records: AdapterRecords) -> list[tuple[str, str]]:
    raise OSError("the share is away")


async def test_what_another_model_holds_is_not_restored(root):
    await ready(root).adapters.load("bot", "a")
    assert await restored(root, model_name="code") == {}
    assert await restored(root, model_identity=b"newer weights") == {}


@pytest.mark.parametrize("name", ["org/" + "語" * 124, "..", "a.json"])
async def test_any_name_is_restored(root, name):
    await ready(root).adapters.load(name, "a")
    assert await restored(root) == {name: b"a"}


async def test_what_cannot_be_restored_is_logged_and_its_record_goes_with_unload(root, caplog):
    harness = ready(root)
    await harness.adapters.load("bot", "a")
    await harness.adapters.load("gone", "b")
    (root / "b").rmdir()
    assert await restored(root) == {"bot": b"a"}
    assert "an adapter that was loaded before is not held" in caplog.text and "name=gone" in caplog.text
    await ready(root).adapters.unload("gone")
    with pytest.raises(NotFound):
        await ready(root).adapters.unload("gone")


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("no memory"), OSError("no such share"), KeyError("rank")])
async def test_one_that_fails_in_any_way_keeps_no_worker_from_its_start(root, caplog, failure):
    harness = ready(root)
    for name, path in {"bot": "a", "large": "b", "other": "a"}.items():
        await harness.adapters.load(name, path)
    assert set(await restored(root, failures={"large": failure})) == {"bot", "other"}
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "not held name=large path=b" in said and "\n" not in said


async def test_a_note_that_cannot_be_read_is_passed_over_alone(root, caplog):
    await ready(root).adapters.load("bot", "a")
    (root / FOLDER / "folder.json").mkdir()
    (root / FOLDER / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (root / FOLDER / "half.json").write_text('{"model": ')
    (root / FOLDER / "bytes.json").write_bytes(b"\xff")
    (root / FOLDER / "other.json").write_text('{"model": "chat"}')
    (root / FOLDER / "unloaded.json").symlink_to("gone")
    assert await restored(root) == {"bot": b"a"}
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 5 and all("is passed over" in line for line in said)
    for name in ("bytes", "deep", "folder", "half", "other"):
        assert sum(f"{name}.json" in line.split("error=")[0] for line in said) == 1


async def test_notes_of_which_none_can_be_read_are_told_in_one_line(root, caplog):
    assert await restored(root) == {} and not caplog.records, "a folder where nothing was loaded yet"
    (root / FOLDER).write_text("a file where the folder belongs")
    assert await restored(root) == {}
    (said,) = caplog.records
    assert "adapters that were loaded before are not held" in said.getMessage()


def test_a_note_is_on_the_disk_before_it_takes_its_name(root, monkeypatch):
    steps, fsync, replace = [], os.fsync, os.replace

    def note(step: str, stat: os.stat_result) -> None:
        steps.append((step, stat.st_ino, stat.st_size))

    monkeypatch.setattr(os, "fsync", lambda fd: (note("fsync", os.fstat(fd)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (note("replace", os.stat(old)), replace(old, new)))
    AdapterRecords(root, "chat", b"weights").keep("bot", "a")
    (record,) = (root / FOLDER).iterdir()
    stat = record.stat()
    assert steps == [(step, stat.st_ino, stat.st_size) for step in ("fsync", "replace")]


async def test_one_that_replaces_the_flags_is_told_and_is_gone_with_unload(root, caplog):
    await ready(root).adapters.load("bot", "b")
    await ready(root).adapters.load("same", "a")
    flags = {"bot": b"a", "same": b"a", "flag": b"c"}
    assert await restored(root, known=dict(flags)) == flags | {"bot": b"b"}
    (said,) = [record.getMessage() for record in caplog.records if "--adapter" in record.getMessage()]
    assert "name=bot path=b" in said
    await ready(root).adapters.unload("bot")
    assert await restored(root, known=dict(flags)) == flags


async def test_a_name_that_never_was_is_not_found_though_notes_cannot_be_looked_at(root, monkeypatch, caplog):
    def forget(records, name):
        raise OSError("the share is away")

    monkeypatch.setattr(AdapterRecords, "forget", forget)
    harness = ready(root)
    with pytest.raises(NotFound):
        await harness.adapters.unload("never")
    await harness.adapters.load("bot", "a")
    await harness.adapters.unload("bot")
    assert "workers that start later may hold this adapter name=bot" in caplog.text


async def test_the_event_loop_waits_for_no_file(root, monkeypatch):
    threads, resolve = set(), Path.resolve
    await ready(root).adapters.load("bot", "a")

    def noted(path: Path, strict: bool = False) -> Path:
        threads.add(threading.current_thread())
        return resolve(path, strict)

    monkeypatch.setattr(Path, "resolve", noted)
    await ready(root).adapters.load("bot", "b")
    await restored(root)
    assert threads and threading.current_thread() not in threads


async def test_records_lead_to_nothing_beyond_the_root(root, tmp_path_factory, caplog):
    harness = ready(root)
    await harness.adapters.load("bot", "a")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for index, path in enumerate((elsewhere, "../elsewhere", 3)):
        record = {"model": "chat", "identity": b"weights".hex(), "name": f"x{index}", "path": path}
        (root / FOLDER / f"{index}.json").write_text(json.dumps(record, default=str))
    assert await restored(root) == {"bot": b"a"}
    assert caplog.text.count("is not below --adapter-root") == 2


async def test_what_cannot_be_recorded_is_loaded_all_the_same(root, caplog):
    (root / FOLDER).write_text("a file where the folder belongs, for want of a disk without room")
    harness = ready(root)
    assert await harness.adapters.load("bot", "a") == b"a"
    assert "workers that start later will not hold this adapter" in caplog.text
    await harness.adapters.unload("bot")
    assert names(harness.hello) == []
