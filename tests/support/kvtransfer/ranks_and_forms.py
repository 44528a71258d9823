"""Sources and takers cut into ranks, in other blocks and forms, and a slow reference for what must arrive."""

import asyncio
import secrets
import time
from dataclasses import dataclass, replace

import numpy as np

from kvtransfer.layout import KV_FORMS, BlockRef, Box, KVGroup, KVLayout, PromptKV
from kvtransfer.memory.blocks import BlockMemory, Cells
from kvtransfer.memory.region import Region
from kvtransfer.memory.reshard import Shard, Sharding
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.transport import local_host_id
from kvtransfer.wire import decode_handle, encode_handle
from tests.support.kvtransfer.rig import Destination, span_hashes
from tests.support.pace import patience

IDENTITY = "0123456789abcdef"
NUM_HEADS, NUM_LAYERS, HEAD_DIM = 4, 4, 8


def layout(block_size: int, form: str, kind: str = "paged") -> KVLayout:
    return KVLayout((KVGroup(kind, NUM_LAYERS, NUM_HEADS, HEAD_DIM, form, block_size),))


def numerics(form: str, tp: int = 1) -> str:
    return f"{IDENTITY}/bf16/bf16/{form}/tp{tp}/exact"


def by_heads(tp: int) -> tuple[Shard, ...]:
    """Tensor parallel: beyond one head a rank, two ranks keep the same one."""
    if tp > NUM_HEADS:
        return tuple(
            (Box(0, range(NUM_LAYERS), range(h, h + 1)),) for h in range(NUM_HEADS) for _ in range(tp // NUM_HEADS)
        )
    step = NUM_HEADS // tp
    return tuple((Box(0, range(NUM_LAYERS), range(rank * step, (rank + 1) * step)),) for rank in range(tp))


def by_layers(num: int) -> tuple[Shard, ...]:
    step = NUM_LAYERS // num
    return tuple((Box(0, range(rank * step, (rank + 1) * step), range(NUM_HEADS)),) for rank in range(num))


def codec(rows: np.ndarray, scales: np.ndarray, source_form: str, taker_form: str) -> tuple[np.ndarray, np.ndarray]:
    """No numerics: bytes that depend on every byte of a row, of its scales, and on both forms."""
    salt = (len(source_form) * 31 + len(taker_form)) % 251
    group = KVGroup("paged", 1, 1, HEAD_DIM, taker_form, 1)
    totals = rows.sum(axis=1, dtype=np.uint32) + 7 * scales.sum(axis=1, dtype=np.uint32)
    columns = np.arange(group.row_bytes, dtype=np.uint32)
    encoded = (rows[:, columns % rows.shape[1]] + totals[:, None] * (columns + 1) + salt) % 256
    columns = np.arange(KV_FORMS[taker_form].scale_bytes, dtype=np.uint32)
    return encoded.astype(np.uint8), (totals[:, None] * (columns + 3) % 256).astype(np.uint8)


@dataclass
class Rank:
    """One rank's pool and what of the model it holds."""

    layout: KVLayout
    shard: Shard
    region: Region
    memory: BlockMemory

    @classmethod
    def make(cls, whole: KVLayout, shard: Shard, num_blocks: int) -> "Rank":
        own = whole.cut(shard)
        region = Region.create(num_blocks * own.block_bytes)
        return cls(whole, shard, region, BlockMemory(region.memory, own))

    def row(self, plane: int, block_ids, token: int, layer: int, kv: int, head: int) -> np.ndarray:
        """Return a row by offsets written out, with nothing of the code under test: the bytes of one row, a view."""
        (box,) = self.shard
        group = self.layout.groups[0]
        sizes = (group.row_bytes, group.row_scale_bytes)
        layers, heads = len(box.layers), len(box.heads)
        block, offset = divmod(token, group.block_size)
        kinds = 1 if group.kind == "latent" else 2
        cell = ((layer - box.layers.start) * kinds + kv) * heads + head - box.heads.start
        first = layers * kinds * heads * group.block_size * sizes[0] if plane else 0
        begin = first + (cell * group.block_size + offset) * sizes[plane]
        return self.memory.blocks[block_ids[block], begin : begin + sizes[plane]]


def cells(rank: Rank, box: Box):
    return Sharding(rank.layout, (rank.shard,)).cells(rank.memory, box)


def widened(rank: Rank) -> bytearray:
    """Return a pool with room for the whole model, in which is what the rank's own has, and nothing else."""
    (box,) = rank.shard
    pool = bytearray(len(rank.memory.blocks) * rank.layout.block_bytes)
    for plane, own in zip(Cells(BlockMemory(pool, rank.layout), box, 0).planes, cells(rank, box).planes):
        plane[...] = own
    return pool


def expected(sources: list[Rank], source_ids, taker_form: str, token: int, layer: int, kv: int, head: int):
    """Return (row, scales) that must arrive: looked up in any source that has them, converted alone."""
    for rank in sources:
        (box,) = rank.shard
        if layer in box.layers and head in box.heads:
            form = rank.layout.groups[0].form
            rows = rank.row(0, source_ids, token, layer, kv, head)
            scales = rank.row(1, source_ids, token, layer, kv, head)
            if form == taker_form:
                return rows, scales
            row, scale = codec(rows[None].copy(), scales[None].copy(), form, taker_form)
            return row[0], scale[0]
    raise AssertionError("no one has it")


def check_arrived(sources: list[Rank], source_ids, takers: list[Rank], taker_ids, tokens) -> None:
    for rank in takers:
        (box,) = rank.shard
        form = rank.layout.groups[0].form
        for token in tokens:
            for layer in box.layers:
                for kv in range(1 if rank.layout.groups[0].kind == "latent" else 2):
                    for head in box.heads:
                        row, scales = expected(sources, source_ids, form, token, layer, kv, head)
                        where = (taker_ids, token, layer, kv, head)
                        assert (rank.row(0, *where) == row).all(), f"row of {where[1:]}"
                        assert (rank.row(1, *where) == scales).all(), f"scales of {where[1:]}"


class Cluster:
    """A source of several ranks and a taker of several, every rank with sockets and pools of its own."""

    def __init__(
        self, transport, source: KVLayout, source_shards, taker: KVLayout, taker_shards, ttl_s=5.0, digest="sum",
        in_whole_pools=False,
    ):  # fmt: skip
        """`in_whole_pools`: the source's ranks have room for the whole model each."""
        rng = np.random.default_rng(3)
        self.num_blocks, self.transport = 24 * 64 // min(source.block_size, taker.block_size, 64), transport
        self.generation = dict.fromkeys(range(self.num_blocks), 5)
        self.source_ids, self.taker_ids = rng.permutation(self.num_blocks), rng.permutation(self.num_blocks)
        self.source_layout, self.taker_layout = source, taker
        self.ranks = [Rank.make(source, shard, self.num_blocks) for shard in source_shards]
        self.takers = [Rank.make(taker, shard, self.num_blocks) for shard in taker_shards]
        for rank in self.ranks:
            rank.memory.blocks[:] = rng.integers(0, 256, rank.memory.blocks.shape, dtype=np.uint8)
        self.endings: list[tuple] = []
        form, mint = source.groups[0].form, TicketMint()
        identity = SourceIdentity(b"prefill-0", 11, bytes(32), numerics(form, len(source_shards)))
        self.sources = [
            Source(
                LocalPool.of(
                    widened(rank) if in_whole_pools else rank.region.memory,
                    Sharding(source, (rank.shard,), in_whole_pool=in_whole_pools), region=rank.region,
                ),
                identity, local_host_id(), lambda key, ending, index=index: self.endings.append((index, key, ending)),
                generations=self.generation.__getitem__, lease_ttl_s=ttl_s,
                transports=(transport,), mint=mint, codec=codec,
            )
            for index, rank in enumerate(self.ranks)
        ]  # fmt: skip
        form = taker.groups[0].form
        self.fetchers = [
            Fetcher(
                LocalPool.of(rank.region.memory, Sharding(taker, taker_shards, index)), b"decode-0", 22,
                local_host_id(), (transport,), numerics_class=numerics(form, len(taker_shards)), codec=codec,
                digest=digest,
            )
            for index, rank in enumerate(self.takers)
        ]  # fmt: skip

    async def __aenter__(self) -> "Cluster":
        for source in self.sources:
            await source.start(Address())
        return self

    async def __aexit__(self, *exc) -> None:
        for source in self.sources:
            await source.stop()
        for fetcher in self.fetchers:
            fetcher.close()
        for rank in (*self.ranks, *self.takers):
            rank.region.close()

    def offer(self, key, num_tokens: int):
        """Return (handle, ticket): each rank leases its part under one name."""
        num_blocks = self.source_layout.num_blocks(num_tokens)
        blocks = tuple(BlockRef(int(block), 5) for block in self.source_ids[:num_blocks])
        hashes, lease_id = span_hashes(num_tokens), secrets.token_bytes(16)
        parent, taker = hashes[-1] if hashes else bytes(32), self.fetchers[0].taker()
        prompt = PromptKV(num_tokens, blocks, tuple(hashes), parent)
        offers = [source.offer(key, prompt, taker, lease_id=lease_id) for source in self.sources]
        for source in self.sources[1:]:
            source.admit(key, offers[0].ticket)
            source.withdraw(offers[self.sources.index(source)].ticket)
        handles = [decode_handle(offer.handle) for offer in offers]
        parts = tuple(part for handle in handles for part in handle.parts)
        return encode_handle(replace(handles[0], parts=parts)), offers[0].ticket

    def destinations(self, num_tokens: int) -> list[Destination]:
        count = self.taker_layout.num_blocks(num_tokens)
        return [Destination([BlockRef(int(block), 1) for block in self.taker_ids[:count]]) for _ in self.takers]

    async def fetch(self, handle: bytes, ticket: bytes, destinations: list[Destination], within_s: float = 20.0):
        deadline = time.monotonic() + patience(within_s)
        fetches = (f.fetch(handle, ticket, d, deadline) for f, d in zip(self.fetchers, destinations))
        return await asyncio.gather(*fetches)

    def finish(self, key) -> None:
        for source in self.sources:
            source.finish(key)

    def advance(self, key, *mark) -> None:
        for source in self.sources:
            source.advance(key, *mark)

    def check_arrived(self, tokens) -> None:
        check_arrived(self.ranks, self.source_ids, self.takers, self.taker_ids, tokens)
