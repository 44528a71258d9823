"""The side that holds KV: offers it, says how far it is written, and serves the takers that come for it."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer import tcp
from kvtransfer.blocks import BlockMemory
from kvtransfer.errors import LayoutMismatch
from kvtransfer.inproc import InprocListener
from kvtransfer.layout import BlockRef, Endpoint, KVHandle, KVLayout, Part
from kvtransfer.leases import Lease, LeaseTable
from kvtransfer.naming import HASH_BYTES, SPAN_TOKENS
from kvtransfer.region import Region
from kvtransfer.serving import Serving, Shelf
from kvtransfer.shm import ShmListener
from kvtransfer.ticket import TicketMint
from kvtransfer.transport import Line, allowed
from kvtransfer.wire import MAX_TOKENS, Taker, encode_handle

_MAX_DIALOGUES = 1024
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    instance: bytes  # names the worker
    epoch: int  # random 64 bits per start
    model_identity: bytes
    numerics_class: str


class Offer(NamedTuple):
    lease_id: bytes
    handle: bytes  # KVHandle
    ticket: bytes  # Ticket


class Source:
    """`memory`: the pool; `region`: the file behind it where other processes may map it, None for a pool that they
    cannot (then there is no shm). `on_release(key)`: exactly once per lease, in the event loop.
    `generations(block_id)`: that block's generation now. All methods belong to the event loop that `start` ran in.

    `counters`: dialogues by how they failed (ticket_refused, lease_expired, layout_mismatch, peer_lost, ...; what the
    taker says has taker_ in front), leases_granted, leases_expired, dialogues_refused, bytes_confirmed."""

    def __init__(
        self, memory, layout: KVLayout, identity: SourceIdentity, host_id: str,
        on_release: Callable[[Hashable], None], *, generations: Callable[[int], int], region: Region | None,
        lease_ttl_s: float = 5.0, transports: Sequence[str] | str = "auto",
    ):  # fmt: skip
        """Raises LayoutMismatch for a layout that cannot be moved, ValueError for an unknown transport."""
        self.identity = identity
        self.layout = layout
        self.counters: Counter[str] = Counter()
        self._host_id = host_id
        self._region = region
        self._ttl_s = lease_ttl_s
        self._transports = allowed(transports)
        self._memory = BlockMemory(memory, layout)
        self._leases = LeaseTable(time.monotonic, on_release)
        self._shelf = Shelf(self._memory, self._leases, TicketMint(), generations, self.counters, {})
        self._endpoints: tuple[Endpoint, ...] = ()
        self._listeners: list = []
        self._tasks: set[asyncio.Task] = set()
        self._reaper: asyncio.Task | None = None

    async def start(self, listen_host: str = "127.0.0.1", advertise_host: str | None = None) -> None:
        """`advertise_host`: what takers on other machines connect to; needed where `listen_host` is a wildcard and the
        host's own name does not lead here. Raises OSError naming what cannot be listened on."""
        endpoints = []
        if "inproc" in self._transports:
            listener = InprocListener(self._memory, lambda line: self._accept(line, "inproc"))
            self._listeners.append(listener)
            endpoints.append(("inproc", listener.name))
        if "shm" in self._transports and self._region is not None:
            shared = ShmListener(self._region, self.layout, lambda line: self._accept(line, "shm"))
            self._listeners.append(shared)
            endpoints.append(("shm", shared.path))
        if "tcp" in self._transports:
            network = await tcp.listen(listen_host, lambda line: self._accept(line, "tcp"))
            self._listeners.append(network)
            endpoints.append(("tcp", _address(network.sock, advertise_host)))
        self._endpoints = tuple(Endpoint(transport, address, self._host_id) for transport, address in endpoints)
        self._reaper = asyncio.create_task(self._reap())

    def endpoints(self) -> tuple[Endpoint, ...]:
        return self._endpoints

    def offer(
        self, key: Hashable, blocks: Sequence[BlockRef], num_tokens: int, span_hashes: Sequence[bytes],
        chain_parent: bytes, taker: Taker, num_ready_tokens: int = 0,
    ) -> Offer:  # fmt: skip
        """A lease on `blocks` for `taker`, with the handle and the ticket that it needs; what is ready already leaves
        as soon as the taker asks. Raises LayoutMismatch for a taker that keeps KV otherwise, ValueError for counts
        that contradict each other or a key that has a lease."""
        self._check_taker(taker)
        if not 1 <= num_tokens <= MAX_TOKENS or len(blocks) != self.layout.num_blocks(num_tokens):
            raise ValueError(f"{len(blocks)} blocks for {num_tokens} tokens")
        if len(span_hashes) != num_tokens // SPAN_TOKENS or len(chain_parent) != HASH_BYTES:
            raise ValueError(f"{len(span_hashes)} span hashes for {num_tokens} tokens")
        self._memory.check_ids([block.block_id for block in blocks])
        lease = self._leases.grant(
            key, blocks=blocks, num_tokens=num_tokens, num_layers=self._memory.num_layers, span_hashes=span_hashes,
            chain_parent=chain_parent, taker=(taker.instance, taker.epoch), ttl_s=self._ttl_s,
        )  # fmt: skip
        if num_ready_tokens:
            lease.advance(num_ready_tokens)
        self.counters["leases_granted"] += 1
        ticket = self._shelf.mint.mint(lease.lease_id, taker.instance, taker.epoch)
        return Offer(lease.lease_id, encode_handle(self._handle(lease)), ticket)

    def advance(self, key: Hashable, upto_token: int, upto_layer: int | None = None) -> None:
        """KV is written below `upto_token` in the layers below `upto_layer` (None: all). A key without a lease is no
        fault: it may have ended. Raises ValueError for a watermark that goes back."""
        if lease := self._leases.of(key):
            lease.advance(upto_token, upto_layer)

    def finish(self, key: Hashable) -> None:
        """Everything is written. The lease ends when its taker has confirmed everything."""
        self._leases.finish(key)

    def cancel(self, key: Hashable) -> None:
        """Ends the lease and its dialogue. Idempotent."""
        self._leases.cancel(key)

    def renew(self, lease_id: bytes) -> bool:
        """The lease lives its ttl from now; False where it has ended."""
        return self._leases.renew(lease_id)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    async def stop(self) -> None:
        """Ends every dialogue and every lease, and removes the sockets."""
        for listener in self._listeners:
            await listener.close()
        self._listeners.clear()
        if self._reaper:
            self._reaper.cancel()
        self._leases.close()
        tasks = [*self._tasks, *([self._reaper] if self._reaper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, line: Line, transport: str) -> None:
        """One dialogue on a line that was accepted."""
        await Serving(self._shelf, line, transport).run()

    def _accept(self, line: Line, transport: str) -> None:
        if len(self._tasks) >= _MAX_DIALOGUES:
            self.counters["dialogues_refused"] += 1
            line.close()
            return
        task = asyncio.create_task(self.serve(line, transport))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_taker(self, taker: Taker) -> None:
        if taker.layout != self.layout:
            raise LayoutMismatch(f"the source keeps {self.layout}, the taker {taker.layout}")
        if taker.numerics_class != self.identity.numerics_class:
            ours = self.identity.numerics_class
            raise LayoutMismatch(f"the source computes {ours}, the taker {taker.numerics_class}")

    def _handle(self, lease: Lease) -> KVHandle:
        parts = tuple(
            Part(index, range(group.num_layers), range(group.num_kv_heads), self._endpoints)
            for index, group in enumerate(self.layout.groups)
        )
        return KVHandle(
            self.identity.instance, self.identity.epoch, lease.lease_id, self.identity.model_identity,
            self.identity.numerics_class, self.layout, parts, lease.num_tokens, lease.span_hashes, lease.chain_parent,
            lease.blocks,
        )  # fmt: skip

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(0.25, self._ttl_s / 4))
            self.counters["leases_expired"] += self._leases.expire()


def _address(sock: socket.socket, advertise_host: str | None) -> str:
    host, port = sock.getsockname()[:2]
    if advertise_host:
        host = advertise_host
    elif host in _WILDCARDS:
        host = socket.gethostbyname(socket.gethostname())
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
