"""Two processes and their pools: a source that offers blocks on request, and a taker that times fetching them, compared
with bare copies between the same two processes. `python -m bench.processes.kv_source FD ...` is the source."""

import asyncio
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import uvloop

from baton.worker.kv.native_digests import memory_kernels
from bench.lib.cpu_time import cpu_s
from bench.lib.paths import ROOT
from kvtransfer.layout import BlockRef, KVGroup, KVLayout, PromptKV
from kvtransfer.memory import digest
from kvtransfer.memory.region import Region
from kvtransfer.transfer.fetcher import Fetcher, FetchReport
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transports.transport import local_host_id

BLOCK_TOKENS, LAYER_BLOCK_BYTES = 16, 64 << 10  # 8 kv heads of 128 in bf16, as in Llama 3.1 8B
POOL_BYTES = 256 << 20
NUMERICS = "0123456789abcdef/bf16/bf16/bf16/tp1/exact"
BARE_PIECE_BYTES = 1 << 20


class Off(digest.Sums):
    """Digests switched off, to show what they cost. Exists in this bench only."""

    def of_pool(self, cells, ids, moved):
        return self.empty(moved)

    def of_staged(self, staged, moved):
        return self.empty(moved)

    copied = digest.Digests.copied

    def empty(self, moved):
        return np.zeros(self.shape(moved), np.uint64)


digest.KINDS["off"] = Off
KERNELS = memory_kernels()  # as in every worker


def layout_of(block_bytes: int) -> KVLayout:
    """Return a layout with blocks of this many bytes, by the number of layers."""
    return KVLayout((KVGroup("paged", block_bytes // LAYER_BLOCK_BYTES, 8, 128, "bf16", BLOCK_TOKENS),))


def scattered(num_blocks: int, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(num_blocks)[:count].tolist()


# ---- the source ----


async def serve(fd: int, block_bytes: int, transports: list[str]) -> None:
    """Read offers from stdin and print handles, until stdin ends."""
    layout = layout_of(block_bytes)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    region = Region(fd, mmap.mmap(fd, POOL_BYTES), read_only)
    num_blocks = POOL_BYTES // layout.block_bytes
    pool = LocalPool.of(region.memory, layout, region=region, kernels=KERNELS)
    source = Source(
        pool, SourceIdentity(b"source", 1, bytes(32), NUMERICS), local_host_id(), lambda *_: None,
        generations=lambda block_id: 1, lease_ttl_s=60.0, transports=transports,
    )  # fmt: skip
    await source.start()
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_bare, args=(listening, region), daemon=True).start()
    print(json.dumps({"bare": listening.getsockname()[1]}), flush=True)
    loop, taker = asyncio.get_running_loop(), None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        key, count = json.loads(line)
        taker = taker or Fetcher(pool, b"taker", 2, local_host_id(), transports, numerics_class=NUMERICS).taker()
        blocks = tuple(BlockRef(block, 1) for block in scattered(num_blocks, count, 1))
        num_tokens = count * BLOCK_TOKENS
        names = tuple(bytes([index % 256]) * 32 for index in range(num_tokens // 64))
        offer = source.offer(key, PromptKV(num_tokens, blocks, names, bytes(32)), taker)
        source.finish(key)
        print(json.dumps([offer.handle.hex(), offer.ticket.hex()]), flush=True)
    await source.stop()


def send_bare(listening: socket.socket, region: Region) -> None:
    """Answer a request for n bytes with the pool's first n, by sendall."""
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := connection.recv(8, socket.MSG_WAITALL):
        connection.sendall(region.memory[: int.from_bytes(asked, "little")])


# ---- the taker ----


class Destination:
    num_cached_tokens = 0

    def __init__(self, blocks: list[BlockRef]):
        self.blocks = blocks

    def set_aside(self, upto_token: int) -> list[BlockRef]:
        return self.blocks

    def verified(self, upto_token: int) -> None:
        """Do nothing, since nobody waits for it here."""

    async def caught_up(self) -> None:
        """Return immediately, since nothing is passed on."""


class Pair:
    """A source process and a taker here. `transports`: those that the source offers; `runner`: the taker's event
    loop."""

    def __init__(self, runner: asyncio.Runner, block_bytes: int, transports: list[str]):
        self._run = runner.run
        self.layout, self.transports = layout_of(block_bytes), transports
        self.num_blocks = POOL_BYTES // block_bytes
        self.regions = [Region.create(POOL_BYTES) for _ in range(2)]
        self.pools = [np.frombuffer(region.memory, np.uint8) for region in self.regions]
        self.pools[0][:] = np.random.default_rng(0).integers(0, 256, POOL_BYTES, dtype=np.uint8)
        self.pools[1][:] = 0  # touch every page before anything is timed
        fd = self.regions[0].fd
        command = [sys.executable, "-m", "bench.processes.kv_source", str(fd), str(block_bytes), ",".join(transports)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,), text=True, cwd=ROOT
        )
        self._source = psutil.Process(self._process.pid)
        self._bare = socket.create_connection(("127.0.0.1", json.loads(self._process.stdout.readline())["bare"]))
        self._bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._fetchers = {
            (name, kind): Fetcher(
                LocalPool.of(self.regions[1].memory, self.layout, kernels=KERNELS), b"taker", 2, local_host_id(), (name,),
                numerics_class=NUMERICS, digest=kind,
            )
            for name in transports for kind in ("sum", "off")
        }  # fmt: skip
        self._keys = 0

    @property
    def cpu_s(self) -> float:
        """Return the CPU time of both processes, the source's in hundredths of a second."""
        return time.process_time() + cpu_s(self._source)

    def fetch(self, transport: str, kind: str, count: int) -> tuple[float, FetchReport]:
        """Return the seconds from the received handle to the last verified block, and the report."""
        self._keys += 1
        self._process.stdin.write(json.dumps([self._keys, count]) + "\n")
        self._process.stdin.flush()
        handle, ticket = map(bytes.fromhex, json.loads(self._process.stdout.readline()))
        blocks = [BlockRef(block, 1) for block in scattered(self.num_blocks, count, 2)]

        async def timed() -> tuple[float, FetchReport]:
            began = time.perf_counter()
            fetcher = self._fetchers[transport, kind]
            report = await fetcher.fetch(handle, ticket, Destination(blocks), time.monotonic() + 60)
            return time.perf_counter() - began, report

        return self._run(timed())

    def check(self, count: int) -> None:
        """Check that the blocks of the last fetch equal the source's. Raises RuntimeError."""
        theirs, ours = (pool.reshape(self.num_blocks, -1) for pool in self.pools)
        if (theirs[scattered(self.num_blocks, count, 1)] != ours[scattered(self.num_blocks, count, 2)]).any():
            raise RuntimeError("other bytes arrived than were offered")
        self.pools[1][:] = 0

    def memcpy(self, num_bytes: int) -> float:
        """Return the seconds of one copy from memory that both processes map."""
        began = time.perf_counter()
        np.copyto(self.pools[1][:num_bytes], self.pools[0][:num_bytes])
        return time.perf_counter() - began

    def sendall(self, num_bytes: int) -> float:
        """Return the seconds of a bare sendall there and recv_into here."""
        began = time.perf_counter()
        self._bare.sendall(num_bytes.to_bytes(8, "little"))
        left = self.regions[1].memory[:num_bytes]
        while left:
            left = left[self._bare.recv_into(left[:BARE_PIECE_BYTES]) :]
        return time.perf_counter() - began

    def close(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._bare.close()
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._process.stdout.close()
        del self.pools
        for region in self.regions:
            region.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as workers do
        runner.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")))
    os._exit(0)  # the bare sender may still wait for its peer
