"""Run the side that holds KV: offer it, announce how far it is written, and serve its takers."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton import failpoints, tasks
from kvtransfer.capabilities import CAPABILITIES
from kvtransfer.compatible import relation
from kvtransfer.layout import Endpoint, KVHandle, Part, PromptKV, Taker
from kvtransfer.memory.blocks import check_movable
from kvtransfer.memory.convert import Codec
from kvtransfer.transfer.connections import Connections
from kvtransfer.transfer.leases import Lease, LeaseEnding, LeaseTable
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source_dialogue import SourceContext, SourceDialogue
from kvtransfer.transfer.ticket import TicketMint, parse_ticket
from kvtransfer.transports.endpoints import Address, Listeners, Memories
from kvtransfer.transports.transport import KVConnection, allowed
from kvtransfer.wire import ID_BYTES, encode_handle


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Say who a source is and how its KV was computed."""

    instance: bytes  # names the worker
    epoch: int  # random 64 bits per start
    model_identity: bytes
    numerics_class: str


class Offer(NamedTuple):
    """What a taker needs to pull a prompt."""

    lease_id: bytes
    handle: bytes  # KVHandle
    ticket: bytes  # Ticket


class Source:
    """Offer prompts to takers and serve them. All methods are called in the event loop that `start` ran in.

    `counters`: failed dialogues by cause (ticket_refused, lease_expired, layout_mismatch, peer_lost, ...; with the
    prefix taker_ where the taker reported the failure), leases_granted, leases_expired, bytes_confirmed."""

    def __init__(
        self, pool: LocalPool, identity: SourceIdentity, host_id: str, on_lease_end: Callable[[Hashable, LeaseEnding], None], *,
        generations: Callable[[int], int], state_generations: Callable[[int], int] | None = None,
        lease_ttl_s: float = 5.0, transports: Sequence[str] | str = "auto", mint: TicketMint | None = None,
        codec: Codec | None = None, is_strict: bool = False, grace_s: float = 0.0,
    ):  # fmt: skip
        """Open nothing yet. `on_lease_end(key, ending)` is called exactly once per lease, in the event loop.
        `generations(block_id)` returns the current generation of a block, `state_generations` that of a block of
        states. `codec` converts between forms; without it only takers of the same form are served. `grace_s`: how long
        to wait for a ticket that another rank has minted and that is not known here yet. Raises ValueError for an
        unknown transport."""
        self.identity = identity
        self.layout = pool.layout
        self.counters: Counter[str] = Counter()
        self._on_lease_end = on_lease_end
        self._host_id = host_id
        self._pool = pool
        self._ttl_s = lease_ttl_s
        self._transports = allowed(transports)
        self._is_strict = is_strict
        self._leases = LeaseTable(lambda: time.monotonic() + failpoints.hit("lease.clock"), self._lease_ended)
        self._context = SourceContext(
            pool, identity.numerics_class, codec, self._leases, mint or TicketMint(),
            generations, state_generations or generations, self.counters, {}, grace_s,
        )  # fmt: skip
        self._listeners = Listeners()
        self._connections = {name: Connections() for name in CAPABILITIES}
        self._reaper: asyncio.Task | None = None

    async def start(self, address: Address | None = None) -> None:
        """Listen for takers. Raises OSError naming what cannot be listened on."""
        device = self._pool.device and self._pool.device.device.region
        memories = Memories(self._pool.host, self._pool.region, device)
        await self._listeners.open(self._transports, memories, address or Address(), self._host_id, self._accept)
        self._reaper = tasks.start("lease reaper", self._reap)

    def endpoints(self) -> tuple[Endpoint, ...]:
        return self._listeners.endpoints

    def offer(
        self, key: Hashable, prompt: PromptKV, taker: Taker, *, num_ready_tokens: int = 0, lease_id: bytes | None = None
    ) -> Offer:
        """Lease a prompt's KV, and return the handle and the ticket that `taker` needs; the taker can pull
        `num_ready_tokens` at once. `lease_id`: given when several ranks lease their parts under one id, to be joined in
        one handle. Raises LayoutMismatch for a taker that KV from here cannot feed, ValueError for a prompt that does
        not fit this layout or a key that has a lease."""
        self._check_taker(taker)
        if len(prompt.blocks) != self.layout.num_blocks(prompt.num_tokens):
            raise ValueError(f"{len(prompt.blocks)} blocks for {prompt.num_tokens} tokens")
        if len(prompt.states) != (self.layout.state is not None):
            raise ValueError(f"{len(prompt.states)} states of one prompt")
        self._pool.host.check_ids([block.block_id for block in prompt.blocks])
        self._pool.host.check_ids([block.block_id for block in prompt.states], are_states=True)
        lease = self._leases.grant(key, prompt, num_layers=self.layout.num_layers, ttl_s=self._ttl_s, lease_id=lease_id)
        if num_ready_tokens:
            lease.advance(num_ready_tokens)
        self.counters["leases_granted"] += 1
        return self._ticket(lease, taker)

    def offer_again(self, lease_id: bytes, taker: Taker) -> Offer:
        """Offer the same lease to one more taker. Raises LeaseExpired if it has ended, LayoutMismatch, ValueError."""
        self._check_taker(taker)
        lease = self._leases.find(lease_id)
        self._leases.renew(lease_id)
        return self._ticket(lease, taker)

    def admit(self, key: Hashable, ticket: bytes) -> None:
        """Accept a ticket that another rank of this source has minted."""
        self._leases.admit(key, parse_ticket(ticket).fetch_id)

    def withdraw(self, ticket: bytes) -> None:
        """Stop serving this ticket and waiting for its taker. Idempotent."""
        parsed = parse_ticket(ticket)
        self._leases.withdraw(parsed.lease_id, parsed.fetch_id)

    def _ticket(self, lease: Lease, taker: Taker) -> Offer:
        fetch_id = secrets.token_bytes(ID_BYTES)
        lease.add_fetch(fetch_id)
        ticket = self._context.mint.mint(lease.lease_id, taker.instance, taker.epoch, fetch_id)
        return Offer(lease.lease_id, encode_handle(self._handle(lease)), ticket)

    def advance(self, key: Hashable, upto_token: int, upto_layer: int | None = None) -> None:
        """Note that KV is written below `upto_token` in the layers below `upto_layer` (None: all layers). Do nothing
        for a key whose lease has ended. Raises ValueError for a watermark that goes back."""
        if lease := self._leases.of(key):
            lease.advance(upto_token, upto_layer)

    def finish(self, key: Hashable) -> None:
        """Note that everything is written. The lease ends when its taker has confirmed everything."""
        self._leases.finish(key)

    def cancel(self, key: Hashable) -> None:
        """Cancel the lease of `key` and its dialogues. Idempotent."""
        self._leases.cancel(key)

    def renew(self, lease_id: bytes) -> bool:
        """Extend the lease to its ttl from now; return False if it has ended."""
        return self._leases.renew(lease_id)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_tickets(self) -> int:
        """Return the number of tickets that are, or may still be, in use."""
        return self._leases.num_fetches

    @property
    def num_connections(self) -> int:
        """Return the number of connections over all transports, including those without a checked ticket."""
        return sum(map(len, self._connections.values()))

    async def stop(self) -> None:
        """End all dialogues and leases, and remove the sockets."""
        await self._listeners.close()
        if self._reaper:
            self._reaper.cancel()
        self._leases.close()
        ending = [task for each in self._connections.values() for task in each.cancel()]
        await asyncio.gather(*ending, *([self._reaper] if self._reaper else []), return_exceptions=True)

    async def serve(self, connection: KVConnection, transport: str) -> None:
        """Serve one dialogue on an accepted connection."""
        await SourceDialogue(self._context, connection, transport, self._connections[transport].establish).run()

    def _accept(self, connection: KVConnection, transport: str) -> None:
        self._connections[transport].open(connection, self.serve(connection, transport))

    def _check_taker(self, taker: Taker) -> None:
        relation(
            self.layout, self.identity.numerics_class, taker.layout, taker.numerics_class, is_strict=self._is_strict
        )
        check_movable(taker.layout)

    def _handle(self, lease: Lease) -> KVHandle:
        identity, endpoints = self.identity, self.endpoints()
        return KVHandle(
            identity.instance,
            identity.epoch,
            lease.lease_id,
            identity.model_identity,
            identity.numerics_class,
            self.layout,
            parts=tuple(Part(*box, endpoints) for box in self._pool.sharding.shard if box.layers),
            prompt=lease.prompt,
        )

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(0.25, self._ttl_s / 4))
            self._leases.expire()

    def _lease_ended(self, key: Hashable, ending: LeaseEnding) -> None:
        self.counters["leases_expired"] += ending is LeaseEnding.EXPIRED
        self._on_lease_end(key, ending)
