"""A worker that cannot be reached is tried for as long as it is known: that says why, and leaves nothing behind."""

import asyncio
import gc
import socket

import pytest

from baton.system import heap_bytes
from gateway.link import worker_link
from gateway.link.worker_link import LinkState, WorkerLink

NUM_WARM, NUM_TRIES = 300, 1000


@pytest.fixture
async def link(monkeypatch):
    """To a port where nothing listens, without pauses between tries."""
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S", "_STARTING_PAUSE_S"):
        monkeypatch.setattr(worker_link, pause, 0.0)
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    link = WorkerLink(
        f"127.0.0.1:{held.getsockname()[1]}",
        b"gateway",
        check_hello=lambda link, hello: None,
        on_change=lambda link: None,
        on_block_events=lambda link, events: None,
        max_unread_tokens=100,
    )
    running = asyncio.create_task(link.run())
    yield link
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    held.close()


async def tried(link: WorkerLink, num: int) -> int:
    """Return the bytes in use after so many tries in all."""
    while link.num_vain < num:
        await asyncio.sleep(0.01)
    gc.collect()
    return heap_bytes()["used"]


async def test_it_is_told_why(link):
    await tried(link, 1)
    assert link.state is LinkState.CONNECTING and link.reason.startswith("UNAVAILABLE") and "refused" in link.reason


@pytest.mark.skipif(not heap_bytes(), reason="this malloc does not tell what is in use")
async def test_a_try_leaves_nothing(link):
    """A stream that is called on a channel that cannot connect leaks 200 bytes and more (grpc/grpc#43360)."""
    before = await tried(link, NUM_WARM)
    after = await tried(link, NUM_WARM + NUM_TRIES)
    assert (after - before) / NUM_TRIES < 100
