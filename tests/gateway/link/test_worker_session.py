"""How long a worker may be silent in its session."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from baton.service.security.access import Access
from baton.v1 import worker_pb2 as pb
from gateway.fleet import process_clock
from gateway.link.worker_session import WorkerSession
from tests.support.pace import patience


class Owner:
    """Joins the worker of any Hello, and takes nothing of it."""

    hello = None

    def accept_hello(self, hello: pb.Hello) -> None:
        return None

    def join(self, hello: pb.Hello) -> None:
        self.hello = hello

    def on_event(self, event: pb.Event) -> None:
        pass


class Worker:
    """A call that brings a Hello, and then what it is told to say."""

    def __init__(self):
        self._said: asyncio.Queue[pb.Event] = asyncio.Queue()
        self._said.put_nowait(pb.Event(hello=pb.Hello()))

    def say_something(self) -> None:
        self._said.put_nowait(pb.Event())

    async def read(self) -> pb.Event:
        return await self._said.get()


async def joined(worker: Worker) -> tuple[WorkerSession, asyncio.Task]:
    """A session with it, and the task that reads what it says."""
    owner = Owner()
    session = WorkerSession("localhost:1", b"i", Access(), owner)  # pyright: ignore[reportArgumentType]
    reading = asyncio.create_task(session._read(worker, asyncio.Queue()))
    async with asyncio.timeout(patience(10)):
        while owner.hello is None:
            await asyncio.sleep(0)
    return session, reading


async def test_a_hello_counts_as_a_word_from_the_worker():
    """Of a worker that joins a gateway which has run for long: its first session was ended at the next tick."""
    session, reading = await joined(Worker())
    session.check_silence(1000.0)
    session.check_silence(2.0)
    await asyncio.sleep(0.05)
    assert not reading.done()
    session.check_silence(1.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(patience(10)):
            await reading


async def test_a_silent_worker_is_lost_though_the_clock_was_started_again(monkeypatch):
    monkeypatch.setattr(process_clock, "TICK_S", 1.0)
    monkeypatch.setattr(process_clock, "now", itertools.count().__next__)
    monkeypatch.setattr(process_clock, "asyncio", SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0)))
    worker = Worker()
    session, reading = await joined(worker)
    ticks = itertools.count(1)

    def fail_after_a_hundred(seconds: float) -> None:
        session.check_silence(seconds)
        if (tick := next(ticks)) < 99:
            worker.say_something()
        assert tick < 100

    with pytest.raises(AssertionError):
        await process_clock.follow_process_time(fail_after_a_hundred)
    clock = asyncio.create_task(process_clock.follow_process_time(session.check_silence))
    for _ in range(10):
        await asyncio.sleep(0)
    assert isinstance(reading.exception(), TimeoutError)
    clock.cancel()


async def test_a_session_is_hung_up_in_the_moment_in_which_silence_ends_it():
    session, reading = await joined(Worker())
    session.check_silence(1.0)
    session.check_silence(8.0)
    await asyncio.sleep(0)  # the session's timeout has fired, and its task has not run
    session.hang_up("the gateway drains")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(patience(10)):
            await reading
