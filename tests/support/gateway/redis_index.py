"""A gateway's prefix index in a real Redis."""

import asyncio
import contextlib
import hashlib

from baton.v1 import worker_pb2 as pb
from gateway.prefix.indexed_worker import IndexedWorker
from gateway.prefix.redis_index import RedisIndex
from tests.support.waiting import until_async

SPANS = [hashlib.sha256(bytes([i])).digest() for i in range(20)]
WORKER, OTHER = b"w" * 24, b"o" * 24


@contextlib.asynccontextmanager
async def index(server, name: bytes, worker: bytes | None = WORKER, fingerprint: bytes = b"f" * 16):
    """Run a gateway's index with one worker; `.snapshots` counts what it asked the worker for."""
    made = RedisIndex(server.url, name)
    made.snapshots = 0

    def subscribe() -> None:
        made.snapshots += 1

    if worker is not None:
        made.join(worker, subscribe)
    await made.check_secret(fingerprint)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def entry_of(index: RedisIndex, worker: bytes = WORKER) -> IndexedWorker:
    """Return what an index knows of a worker whose session it has."""
    return index._workers[worker]


def entries_of(index: RedisIndex) -> list[IndexedWorker]:
    return list(index._workers.values())


def snapshot(*spans) -> pb.BlockEvents:
    return pb.BlockEvents(seq=0, snapshot=True, sealed=spans)


async def finds(index, worker: bytes, num_spans: int, spans=SPANS) -> None:
    """Wait until the index says of a worker that it has so many of the spans."""

    async def found() -> bool:
        return (await index.lookup(spans)).get(worker, 0) == num_spans

    await until_async(found)
