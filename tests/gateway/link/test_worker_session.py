"""How long a worker may be silent in its session."""

import asyncio

import pytest

from baton.service.security.access import Access
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_session import WorkerSession
from tests.support.pace import patience


class Owner:
    """Joins the worker of any Hello, and takes nothing of it."""

    hello = None

    def accept_hello(self, hello: pb.Hello) -> None:
        return None

    def join(self, hello: pb.Hello) -> None:
        self.hello = hello


class SilentWorker:
    """A call that brings a Hello, and then nothing."""

    def __init__(self):
        self._has_said_hello = False

    async def read(self) -> pb.Event:
        if self._has_said_hello:
            await asyncio.Event().wait()
        self._has_said_hello = True
        return pb.Event(hello=pb.Hello())


async def test_a_hello_counts_as_a_word_from_the_worker():
    """Of a worker that joins a gateway which has run for long: its first session was ended at the next tick."""
    owner = Owner()
    session = WorkerSession("localhost:1", b"i", Access(), owner)  # pyright: ignore[reportArgumentType]
    reading = asyncio.create_task(session._read(SilentWorker(), asyncio.Queue()))
    async with asyncio.timeout(patience(10)):
        while owner.hello is None:
            await asyncio.sleep(0)
        session.check_silence(1000.0)
        session.check_silence(1002.0)
        await asyncio.sleep(0.05)
        assert not reading.done()
        session.check_silence(1003.0)
        with pytest.raises(TimeoutError):
            await reading
