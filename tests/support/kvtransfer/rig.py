"""A source and a taker with pools of their own, and a connection that does to frames what a test wants."""

import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtransfer.layout import BlockRef, KVGroup, KVLayout, PromptKV
from kvtransfer.memory.region import Region
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Offer, Source, SourceIdentity
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.nixl_engine import find_package
from kvtransfer.transports.socket_folder import default_parent
from kvtransfer.transports.transport import local_host_id
from tests.support.kvtransfer.cuda_stand_in import Host
from tests.support.pace import patience
from tests.support.waiting import until_async

NUMERICS = "0123456789abcdef/bf16/bf16/bf16/tp1/exact"
IDENTITY = SourceIdentity(b"prefill-0", 11, bytes(32), NUMERICS)
NUM_BLOCKS = 40
NUM_STATES = 5
NUM_TOKENS = 300  # four spans and a tail of 44
TRANSPORTS = ("inproc", "cuda_ipc", "shm", "tcp", "grpc", *(("nixl",) if find_package() else ()))


def layout(block_size: int = 16, form: str = "bf16", num_layers: int = 3) -> KVLayout:
    return KVLayout((KVGroup("paged", num_layers, 2, 16, form, block_size),))


def free_ports(count: int) -> int:
    """Return the first of ports that follow each other and that nobody listens on. The system does not choose from
    them: one of its own might be taken by another program before the test listens there."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    firsts = [*range(10_000, low - count), *range(high + 1, 65_536 - count)]
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = random.choice(firsts)
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def span_hashes(num_tokens: int) -> list[bytes]:
    return [bytes([index]) * 32 for index in range(num_tokens // 64)]


def kind(frame) -> str:
    return frame.WhichOneof("kind")


class InterceptedConnection:
    """Wrap a KVConnection: `intercept(frame, connection)` sees every frame that is about to be sent through it, and
    returns the frames to send instead."""

    def __init__(self, connection, intercept):
        self._connection, self._intercept = connection, intercept

    def __getattr__(self, name):
        return getattr(self._connection, name)

    async def send(self, frame, payload=()):
        for each in self._intercept(frame, self._connection):
            await self._connection.send(each, payload)


class FaultySource(Source):
    fault: Callable | None = None

    async def serve(self, connection, transport):
        await super().serve(InterceptedConnection(connection, self.fault) if self.fault else connection, transport)


class Destination:
    """Blocks of the taker's pool, in an order of their own."""

    def __init__(self, blocks, num_cached_tokens=0, state=0):
        self.blocks, self.state = blocks, state
        self.num_cached_tokens = num_cached_tokens
        self.asked: list[int] = []
        self.upto: list[int] = []

    def set_aside(self, upto_token):
        self.asked.append(upto_token)
        return self.blocks

    def state_block(self):
        return BlockRef(self.state, 1)

    def verified(self, upto_token):
        self.upto.append(upto_token)

    async def caught_up(self):
        """Nothing goes anywhere else."""


class Rig:
    def __init__(
        self, transport: str | tuple[str, ...], shape: KVLayout, ttl_s: float = 30.0,
        taker_shape: KVLayout | None = None,
        source_folder: Path | None = None, taker_folder: Path | None = None,
        on_gpu: tuple[bool, bool] | None = None, digest: str = "sum", host: Host | None = None,
        rooms: tuple = (None, None),
    ):  # fmt: skip
        """`on_gpu`: whether the source's pool and the taker's are on a GPU, of `host`; `rooms`: of their mirrors, made
        by (memory's region) -> MirrorRoom."""
        rng = np.random.default_rng(7)
        self.transports = (transport,) if isinstance(transport, str) else transport
        self.digest = digest
        self.taker_folder = taker_folder or default_parent()
        self.address = Address(socket_folder=source_folder or default_parent())
        self.layout = shape
        self.taker_layout = taker_shape or shape
        self.regions = [Region.create(_pool_bytes(each)) for each in (shape, self.taker_layout)]
        self.rooms = [make and make(region) for make, region in zip(rooms, self.regions)]
        self.gpus: list = [None, None]
        if on_gpu is None:
            on_gpu = (transport == "cuda_ipc",) * 2
        host = host or (Host() if any(on_gpu) else None)
        for side, region in enumerate(self.regions):
            if on_gpu[side]:
                from tests.support.kvtransfer.pool_on_gpu import (
                    Gpu,  # needs torch, which the other transports are tested without
                )

                self.gpus[side] = Gpu(host, region)
                np.frombuffer(region.memory, np.uint8)[:] = 0x55  # what a mirror holds before anything crossed
        self.source_pool, self.taker_pool = (
            gpu.pool if gpu else np.frombuffer(region.memory, np.uint8) for gpu, region in zip(self.gpus, self.regions)
        )
        self.source_pool[:] = rng.integers(0, 256, len(self.source_pool), dtype=np.uint8)
        self.generation = dict.fromkeys(range(NUM_BLOCKS), 5)
        self.state_generation = dict.fromkeys(range(NUM_STATES), 9)
        self.source_state, self.taker_state = 3, 1  # of layouts with a state
        self.released: list = []
        self.endings: dict = {}
        self.pools = [
            LocalPool.of(region.memory, each, region=region, device=gpu and gpu.device, room=room)
            for region, each, gpu, room in zip(self.regions, (shape, self.taker_layout), self.gpus, self.rooms)
        ]
        self.source = FaultySource(
            self.pools[0], IDENTITY, local_host_id(source_folder), self.on_lease_end,
            generations=self.generation.__getitem__, state_generations=self.state_generation.__getitem__,
            lease_ttl_s=ttl_s, transports=("auto", *self.transports),
        )  # fmt: skip
        self.fetchers: list[Fetcher] = []
        self.fetcher = self.make_fetcher(b"decode-0", 22)
        self.source_ids = rng.permutation(NUM_BLOCKS)
        self.taker_ids = rng.permutation(NUM_BLOCKS)

    def on_lease_end(self, key, ending: str) -> None:
        self.released.append(key)
        self.endings[key] = ending

    def make_fetcher(self, instance: bytes, epoch: int) -> Fetcher:
        fetcher = Fetcher(
            self.pools[1], instance, epoch, local_host_id(self.taker_folder), self.transports,
            numerics_class=NUMERICS, socket_folder=self.taker_folder, digest=self.digest,
        )  # fmt: skip
        self.fetchers.append(fetcher)
        return fetcher

    def offer(self, key="k", num_tokens=NUM_TOKENS, fetcher: Fetcher | None = None, num_ready_tokens=0) -> Offer:
        count = self.layout.num_blocks(num_tokens)
        blocks = tuple(BlockRef(int(block), 5) for block in self.source_ids[:count])
        taker = (fetcher or self.fetcher).taker()
        hashes = span_hashes(num_tokens)
        parent = hashes[-1] if hashes else bytes(32)
        states = (BlockRef(self.source_state, 9),) if self.layout.state else ()
        prompt = PromptKV(num_tokens, blocks, tuple(hashes), parent, states)
        return self.source.offer(key, prompt, taker, num_ready_tokens=num_ready_tokens)

    def ready_offer(self, key="k", num_tokens=NUM_TOKENS) -> Offer:
        offer = self.offer(key, num_tokens)
        self.source.finish(key)
        return offer

    def destination(self, num_tokens=NUM_TOKENS, num_cached_tokens=0) -> Destination:
        count = self.taker_layout.num_blocks(num_tokens)
        blocks = [BlockRef(int(block), 1) for block in self.taker_ids[:count]]
        return Destination(blocks, num_cached_tokens, self.taker_state)

    async def fetch(self, offer: Offer, destination: Destination, within_s: float = 20.0):
        return await self.fetcher.fetch(offer.handle, offer.ticket, destination, time.monotonic() + patience(within_s))

    def tokens(self, pool: np.ndarray, ids: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Return [tokens, layers * 2 * heads, row bytes] of a request, whatever blocks it is in."""
        group = (self.layout if pool is self.source_pool else self.taker_layout).groups[0]
        cells = group.num_layers * 2 * group.num_kv_heads
        blocks = pool[: NUM_BLOCKS * group.block_bytes].reshape(NUM_BLOCKS, -1)
        rows = blocks[:, : group.head_bytes].reshape(NUM_BLOCKS, cells, group.block_size, -1)
        positions = np.arange(begin, end)
        return rows[ids[positions // group.block_size], :, positions % group.block_size]

    def state(self, pool: np.ndarray) -> np.ndarray:
        """Return the bytes of the request's state: blocks of states stand at the end, the first one last."""
        size, index = self.layout.state_bytes, self.source_state if pool is self.source_pool else self.taker_state
        return pool[len(pool) - (index + 1) * size : len(pool) - index * size]

    def arrived(self, begin=0, end=NUM_TOKENS) -> bool:
        theirs = self.tokens(self.source_pool, self.source_ids, begin, end)
        return bool((self.tokens(self.taker_pool, self.taker_ids, begin, end) == theirs).all())

    def close(self) -> None:
        for fetcher in self.fetchers:
            fetcher.close()
        for gpu in filter(None, self.gpus):
            gpu.close()
        for region in self.regions:
            region.close()

    async def wait_released(self, *keys) -> None:
        await until_async(lambda: self.released == list(keys), lambda: f"released: {self.released}")


def _pool_bytes(layout: KVLayout) -> int:
    return layout.pool_bytes(NUM_BLOCKS, NUM_STATES if layout.state is not None else 0)


@contextlib.asynccontextmanager
async def running(transport: str | tuple[str, ...], shape: KVLayout | None = None, **options):
    """Run a rig; behind it the source must be able to serve one more request and every lease must have ended once."""
    rig = Rig(transport, shape or layout(), **options)
    await rig.source.start(rig.address)
    try:
        yield rig
    finally:
        await rig.source.stop()
        rig.close()
        assert rig.source.num_leases == 0
        assert len(rig.released) == rig.source.counters["leases_granted"], "every lease ends exactly once"


async def assert_still_serves(rig: Rig) -> None:
    """Check that the next request goes through, whatever befell the last."""
    rig.source.fault = None
    rig.taker_pool[:] = 0
    destination = rig.destination()
    await rig.fetch(rig.ready_offer("next"), destination)
    assert rig.arrived() and destination.upto[-1] == NUM_TOKENS
