"""Run a rank on a GPU with a KV pool of its own: beside its steps, an event loop in another thread serves its part of
each prompt's KV and pulls what other workers have."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from baton.engine.gpu_ranks.program import serve
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.ranks.process import Assignment
from baton.service.security.guard import Guard
from baton.service.security.tls import Tls
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.pool_memory import PoolMemory
from baton.worker.kv.security import kv_security
from baton.worker.ranks.notes import END_S, LocalStream, OpenOrder
from baton.worker.ranks.rank_pools import sharding_of
from baton.worker.ranks.source import RankSource
from baton.worker.ranks.taker import RankTaker
from kvtransfer.errors import KVError
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.source import Source
from kvtransfer.transports.endpoints import Address, num_ports
from kvtransfer.transports.socket_folder import default_parent
from kvtransfer.transports.transport import local_host_id

PROGRAM = "baton.worker.ranks.device"


class DeviceRank:
    """Run both ends of KV transfer for one rank's pool. Made and used in the event loop."""

    def __init__(self, memory: PoolMemory, pool: KVPool, sharding: Sharding, stream: LocalStream):
        self._memory, self._pool, self._sharding, self._stream = memory, pool, sharding, stream
        self._source: RankSource | None = None
        self._taker: RankTaker | None = None
        self._is_over = asyncio.Event()
        stream.on_note, stream.on_end = self._handle_note, self._is_over.set

    async def run(self) -> None:
        """Serve until the worker closes the stream."""
        await self._stream.start()
        await self._is_over.wait()
        if self._source is not None and self._taker is not None:
            await self._source.stop()
            await self._taker.stop()
        await self._stream.stop()

    def _handle_note(self, note: dict) -> None:
        if "open" in note:
            try:
                self._open(note["open"])
            except (OSError, ValueError, KVError) as error:
                self._stream.send_note({"closed": str(error)})
        if "fetch" in note:
            assert self._taker is not None
            self._taker.handle_note(note)
        elif self._source is not None:
            self._source.handle_note(note)

    def _open(self, order: OpenOrder) -> None:
        settings, memory = order["settings"], self._memory
        memory.mirror_gib = settings["mirror_gib"]
        memory.mirror(self._pool)
        folder = Path(settings["socket_dir"]) if settings["socket_dir"] else None
        tls = None if settings["tls"] is None else Tls(*map(Path, settings["tls"]))
        security = kv_security(tls, Guard(is_open=tls is None))
        host_id, transports = local_host_id(folder), settings["transports"]
        pool = memory.as_local_pool(self._sharding)
        make = partial(Source, pool, host_id=host_id, transports=transports, codec=convert_rows)
        first_port = settings["kv_port"] and settings["kv_port"] + self._sharding.rank * num_ports(transports)
        address = Address(
            settings["listen_host"], settings["advertise_host"], folder or default_parent(), security, first_port
        )
        self._source = RankSource(make, address, self._stream.send_note)
        fetcher = Fetcher(
            pool, bytes.fromhex(order["instance"]), order["epoch"], host_id, transports, numerics_class=order["numerics"],
            socket_folder=folder, codec=convert_rows, digest=settings["digest"], is_strict=order["is_strict"],
            security=security,
        )  # fmt: skip
        self._taker = RankTaker(fetcher, self._stream.send_note)


@contextmanager
def beside(memory: PoolMemory, given: Assignment, model: Model, pool: KVPool) -> Iterator[None]:
    """Serve KV within the block, until the worker closes the stream or is gone."""
    layout = model.spec.kv_layout(pool.group.form, pool.block_size)
    sharding = sharding_of(layout, given.config, model.spec, given.shard.rank)

    async def run() -> None:
        if pool.device.type == "cuda":
            torch.cuda.set_device(pool.device)  # else this thread would make a context on the first GPU
        stream = LocalStream(socket.socket(fileno=given.stream_fd))
        await DeviceRank(memory, pool, sharding, stream).run()

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="kv", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(END_S)  # it ends too, because the worker has gone


def main() -> None:
    memory = PoolMemory()
    serve(memory.allocate_on_gpu, partial(beside, memory))


if __name__ == "__main__":
    main()
