"""The prefix index in Redis, shared by gateways. Serving never depends on it: every failure is a miss.

    kv:<16 bytes of a span hash>   bit string, one bit per worker slot; expires
    baton:slot:<n>                 the worker (instance, epoch) that has slot n; also its entry in the registry
    baton:writer:<worker>          the gateway that writes this worker's events
    baton:secret                   fingerprint of the cluster secret in use
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence

from baton import tasks
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from gateway.breaker import Breaker
from gateway.matches import NOWHERE, Matches, Places
from gateway.prefix_index import Feed
from gateway.redis_client import FAILURES, cancelled, make_client, values_of, words_of
from gateway.slots import NUM_BYTES, NUM_SLOTS, bit_sets, last_held, places_of, sampled_ends, spread

BUDGET_S = 0.05
NAME_BYTES = 16
KV_TTL_S = 600
# A slot is free again only when every bit that was set for it has had the time to expire.
SLOT_TTL_S = KV_TTL_S + 30
WRITER_TTL_S = 5
SECRET_TTL_S = 60
_HEARTBEAT_S = 1.0
_FLUSH_S = 0.02
_REFRESH_S = KV_TTL_S / 3
_BATCH = 64  # 1,000 commands take the event loop 20 ms to write down: tokens and lookups would wait
_MAX_SPANS = 4096  # 262,144 tokens
_CONTROL_TIMEOUT_S = 1.0
_MAX_LOOKUP_BYTES = 1 << 17  # 276 values of 1,024 slots are 38 KB, and there are 32 connections
_MAX_NAME_BYTES = 64  # of a worker, a gateway, a fingerprint

log = logging.getLogger(__name__)


class SecretDiffers(Exception):
    """Gateways with another cluster secret are on this Redis."""


class _Worker:
    """A worker that serves this gateway."""

    def __init__(self, worker: bytes, subscribe: Callable[[], None]):
        self.worker = worker
        self.feed = Feed(subscribe)
        self.is_ours = False  # this gateway writes its events
        self.slot: int | None = None
        self.pending: dict[bytes, bool] = {}  # span -> sealed
        self.refreshed_at = 0.0

    def refresh(self, at: float) -> None:
        """Everything is to be written again."""
        self.pending = dict.fromkeys(self.feed.spans, True)
        self.refreshed_at = at


class RedisIndex:
    """See PrefixIndex. `run()` is its life beside the requests."""

    def __init__(self, url: str, gateway: bytes):
        """Raises ValueError for a URL that is none."""
        self._gateway = gateway
        self._hot = make_client(url, BUDGET_S, 32, _MAX_LOOKUP_BYTES)
        self._control = make_client(url, _CONTROL_TIMEOUT_S, 2)
        self._breaker = Breaker()
        self._workers: dict[bytes, _Worker] = {}
        self._places: Places = NOWHERE  # of the slots
        self._fingerprint: bytes | None = None
        self._asking: set[asyncio.Task] = set()
        self._written, self._joined = asyncio.Event(), asyncio.Event()
        self.is_disabled = False

    # ---- PrefixIndex ----

    async def lookup(self, hashes: Sequence[bytes]) -> Matches:
        if not hashes or not self._breaker.closed or self.is_disabled or not self._places.mask:
            return Matches()
        # A task of its own: whoever gives up the request does not cut a reply in two, and redis-py, which at times
        # swallows a cancellation, does not swallow that one.
        asking = asyncio.create_task(self._ask(hashes[:_MAX_SPANS]), name="redis lookup")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait((asking,), timeout=BUDGET_S)
        found = asking.result() if asking.done() and not asking.cancelled() else None
        if found is None:
            self._breaker.failed()
            return Matches()
        self._breaker.succeeded()
        return found

    def join(self, worker: bytes, subscribe: Callable[[], None]) -> None:
        self._workers[worker] = _Worker(worker, subscribe)
        self._joined.set()

    def apply(self, worker: bytes, events: pb.BlockEvents) -> None:
        if (entry := self._workers.get(worker)) is None or not entry.is_ours:
            return
        change = entry.feed.apply(events)
        entry.pending.update(dict.fromkeys(change.evicted, False))
        entry.pending.update(dict.fromkeys(change.sealed, True))
        if entry.pending:
            self._written.set()

    def drop(self, worker: bytes) -> None:
        self._workers.pop(worker, None)  # its bits expire; nobody is routed to a worker that does not serve

    async def _ask(self, hashes: Sequence[bytes]) -> Matches | None:
        """None when it fails. Its connection's timeouts end it a moment after the budget at the latest."""
        places, ends = self._places, sampled_ends(len(hashes))
        try:
            sampled = list(bit_sets(await self._get([hashes[end - 1] for end in ends])))
            longest = last_held(sampled, places.mask)
            begin = ends[longest - 1] if longest else 0
            end = ends[longest] - 1 if longest < len(ends) else begin
            rest = bit_sets(await self._get(hashes[begin:end])) if begin < end else ()
            return Matches(itertools.chain(spread(sampled[:longest], ends), rest), places)
        except FAILURES as error:
            log.debug("redis: lookup failed %s", fields(error=words_of(error)))
            return None

    async def _get(self, hashes: Sequence[bytes]) -> Sequence[bytes | None]:
        """Raises one of FAILURES."""
        return await values_of(self._hot, [b"kv:" + value[:NAME_BYTES] for value in hashes], NUM_BYTES)

    @property
    def down(self) -> str:
        """Why lookups find nothing at present; empty while they are asked."""
        if self.is_disabled:
            return "another cluster secret is in use there"
        return "" if self._breaker.closed else "it does not answer"

    # ---- beside the requests ----

    async def check_secret(self, fingerprint: bytes) -> None:
        """Raises SecretDiffers. A Redis that does not answer is asked again with every heartbeat."""
        self._fingerprint = fingerprint
        try:
            await self._hold_secret()
            await self._read_slots()
        except SecretDiffers:
            raise
        except FAILURES as error:
            log.warning("redis: no answer, serving without it %s", fields(error=words_of(error)))

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks.start("redis heartbeat", self._beat, group=group)
                tasks.start("redis writer", self._write, group=group)
        finally:
            await self._hot.aclose()
            await self._control.aclose()

    async def _beat(self) -> None:
        was_up = True
        while not cancelled():
            try:
                if not self.is_disabled:
                    await self._heartbeat()
                if not was_up:
                    log.info("redis: back")
                was_up = True
            except SecretDiffers as error:
                self.is_disabled = True
                log.error("redis: not used any more %s", fields(error=error))
            except FAILURES as error:
                if was_up:
                    log.warning("redis: lost, serving without it %s", fields(error=words_of(error)))
                was_up = False
                for entry in self._workers.values():
                    entry.refreshed_at = 0.0
            if not cancelled():
                await self._pause()

    async def _pause(self) -> None:
        """Until the next heartbeat is due, or a worker has joined."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_S):
                await self._joined.wait()
        self._joined.clear()

    async def _heartbeat(self) -> None:
        await self._hold_secret()
        for entry in list(self._workers.values()):
            await self._hold_writer(entry)
            if entry.is_ours:
                await self._hold_slot(entry)
        await self._read_slots()
        now = asyncio.get_running_loop().time()
        for entry in self._workers.values():
            if entry.is_ours and entry.slot is not None and now - entry.refreshed_at > _REFRESH_S:
                entry.refresh(now)
                self._written.set()
        if not self._breaker.closed:
            await self._hot.ping()
            self._breaker.succeeded()

    async def _hold_secret(self) -> None:
        if self._fingerprint is None:
            return
        await self._control.set("baton:secret", self._fingerprint, nx=True, ex=SECRET_TTL_S)
        if await self._value(b"baton:secret") not in (self._fingerprint, None):
            raise SecretDiffers("the gateways on this Redis have another cluster secret: give this one the same file")
        await self._control.expire("baton:secret", SECRET_TTL_S)

    async def _hold_writer(self, entry: _Worker) -> None:
        """One gateway writes. Two that do for a moment write the same, so no more care is taken."""
        name = b"baton:writer:" + entry.worker
        is_ours = bool(await self._control.set(name, self._gateway, nx=True, ex=WRITER_TTL_S))
        if not is_ours and await self._value(name) == self._gateway:
            await self._control.expire(name, WRITER_TTL_S)
            is_ours = True
        was_ours, entry.is_ours = entry.is_ours, is_ours
        if is_ours and not was_ours:
            entry.feed.subscribe()

    async def _hold_slot(self, entry: _Worker) -> None:
        if entry.slot is not None and await self._value(_slot_name(entry.slot)) == entry.worker:
            await self._control.expire(_slot_name(entry.slot), SLOT_TTL_S)
            return
        entry.slot = await self._lease_slot(entry.worker)
        entry.refreshed_at = 0.0  # a Redis that has forgotten the slot has forgotten the bits
        if entry.slot is None:
            log.warning("redis: all slots are taken, spans of a worker are not shared %s", fields(slots=NUM_SLOTS))

    async def _lease_slot(self, worker: bytes) -> int | None:
        holders = await self._holders()
        if worker in holders:
            return holders.index(worker)
        for slot, holder in enumerate(holders):
            if holder is None and await self._control.set(_slot_name(slot), worker, nx=True, ex=SLOT_TTL_S):
                return slot
        return None

    async def _read_slots(self) -> None:
        self._places = places_of(await self._holders())

    async def _holders(self) -> list[bytes | None]:
        """Of each slot who has it."""
        return await values_of(self._control, [_slot_name(slot) for slot in range(NUM_SLOTS)], _MAX_NAME_BYTES)

    async def _value(self, name: bytes) -> bytes | None:
        return (await values_of(self._control, [name], _MAX_NAME_BYTES))[0]

    async def _write(self) -> None:
        while not cancelled():
            await self._written.wait()
            await asyncio.sleep(_FLUSH_S)
            self._written.clear()
            for entry in list(self._workers.values()):
                if entry.is_ours and entry.slot is not None and not self.is_disabled:
                    await self._write_pending(entry)

    async def _write_pending(self, entry: _Worker) -> None:
        """A failed batch is forgotten: the next heartbeat that succeeds has everything written again."""
        pending, entry.pending = list(entry.pending.items()), {}
        try:
            for begin in range(0, len(pending), _BATCH):
                async with self._control.pipeline(transaction=True) as batch:
                    for span, sealed in pending[begin : begin + _BATCH]:
                        name = b"kv:" + span[:NAME_BYTES]
                        batch.setbit(name, entry.slot, int(sealed))
                        batch.expire(name, KV_TTL_S)
                    await batch.execute()
        except FAILURES as error:
            entry.refreshed_at = 0.0
            log.warning("redis: index events were not written %s", fields(error=words_of(error)))


def _slot_name(slot: int) -> bytes:
    return b"baton:slot:%d" % slot
