"""The prefix index in Redis, shared by gateways. Serving never depends on it: every failure is a miss.

    kv:<16 bytes of a span hash>   bit string, one bit for each worker's slot; removed with its last bit, and expires
    baton:slot:<n>                 the worker that has slot n (slot_leases.py)
    baton:writer:<worker>          the gateway that writes this worker's events
    baton:secret                   fingerprint of the cluster secret in use

An evicted span is certain to be written: a batch that fails is written again, into the same slot or, after a while, as
all that the worker holds into another slot. So a lookup names a worker for a span that it does not hold only until the
next batch is written. If no gateway has a session with the worker, lookups do not name it.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller

from baton import tasks
from baton.lines import describe_error
from baton.service.clock import now
from baton.service.logs import fields
from baton.tasks import is_cancelled
from baton.v1 import worker_pb2 as pb
from gateway.prefix.indexed_worker import BATCH, IndexedWorker
from gateway.prefix.prefix_index import SecretDiffers
from gateway.prefix.prefix_matches import Matches
from gateway.prefix.slot_leases import GIVE_UP_S, KV_TTL_S, SlotLeases
from gateway.prefix.worker_bitmap import (
    NUM_BYTES,
    NUM_SLOTS,
    bit_sets,
    last_held,
    mask_of,
    sampled_ends,
    slots_in,
    spread,
)
from gateway.store.breaker import Breaker
from gateway.store.redis_client import FAILURES, MAX_BATCH, answers_of, fault_of, is_wrong_type, make_client, values_of

BUDGET_S = 0.05
NAME_BYTES = 16
WRITER_TTL_S = 5
SECRET_TTL_S = 60
_HEARTBEAT_S = 1.0
_FLUSH_S = 0.02
_LOG_INTERVAL_S = 60.0  # between two log lines of one text
_REFRESH_S = KV_TTL_S / 3
_LEASED_AT_ONCE = 64  # if the answer is lost, these slots stay unused for 12 minutes
_MAX_SPANS = 4096  # 262,144 tokens
_CONTROL_TIMEOUT_S = 1.0
_MAX_LOOKUP_BYTES = 1 << 17  # 276 values of 1,024 slots are 38 KB, and there are 32 connections
_MAX_NAME_BYTES = 64  # of a gateway's name or a fingerprint
_NEVER = float("-inf")

log = logging.getLogger(__name__)


class RedisIndex:
    """A PrefixIndex in Redis, shared with other gateways."""

    def __init__(self, url: str, gateway: bytes):
        """Prepare the index in the Redis at `url`. Raises ValueError for a malformed URL."""
        self._gateway = gateway
        self._hot = make_client(url, BUDGET_S, 32, _MAX_LOOKUP_BYTES)
        self._control = make_client(url, _CONTROL_TIMEOUT_S, 2)
        self._breaker = Breaker()
        self._workers: dict[bytes, IndexedWorker] = {}
        self._left: dict[bytes, IndexedWorker] = {}  # whose session ended a moment ago
        self._slots = SlotLeases(self._control, _CONTROL_TIMEOUT_S, gateway)
        self._fingerprint: bytes | None = None
        self._asking: set[asyncio.Task] = set()
        self._written, self._joined = asyncio.Event(), asyncio.Event()
        self._lost_for = ""  # why the last heartbeat failed: lookups would fail likewise
        self._warned_at: dict[str, float] = {}
        self._is_slow = False  # the last heartbeat: names of writers may lapse before the next one
        self.is_disabled = False

    # ---- PrefixIndex ----

    async def lookup(self, hashes: Sequence[bytes]) -> Matches:
        began_at = now()
        if not hashes or not self._breaker.is_closed or self.is_disabled or not self._slots.may_be_looked_up(began_at):
            return Matches()
        # A separate task: a cancelled request does not cut a reply in two, and redis-py, which at times swallows a
        # cancellation, cannot swallow the request's.
        asking = asyncio.create_task(self._ask(hashes[:_MAX_SPANS]), name="redis lookup")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait((asking,), timeout=BUDGET_S)
        found = asking.result() if asking.done() and not asking.cancelled() else None
        if found is None:
            self._breaker.failed(began_at)
            return Matches()
        self._breaker.succeeded()
        return found

    def join(self, worker: bytes, subscribe: Callable[[], None]) -> None:
        entry = self._left.pop(worker, None) or IndexedWorker(worker, subscribe)
        entry.feed.join(subscribe)
        entry.is_ours = False  # until Redis says so; then a snapshot is asked for
        self._workers[worker] = entry
        self._joined.set()

    def apply(self, worker: bytes, events: pb.BlockEvents) -> None:
        if (entry := self._workers.get(worker)) is None or not entry.is_ours:
            return
        change = entry.feed.apply(events)
        if not entry.may_write(now()):
            entry.is_given_up = True  # all that it holds goes into the next slot
            return
        entry.change(change)
        if entry.pending and not entry.unwritten_for:  # else the next heartbeat tries again
            self._written.set()

    def drop(self, worker: bytes) -> None:
        """Stop routing to this worker. Its slot is remembered for a moment: if the worker comes back, its snapshot
        shows what it has evicted meanwhile."""
        if entry := self._workers.pop(worker, None):
            self._left[worker], entry.left_at = entry, now()

    async def _ask(self, hashes: Sequence[bytes]) -> Matches | None:
        """Return matches, or None on failure. The connection's timeouts end this a moment after the budget at the
        latest."""
        worker_bits, ends = self._slots.worker_bits, sampled_ends(len(hashes))
        try:
            sampled = list(bit_sets(await self._get([hashes[end - 1] for end in ends])))
            longest = last_held(sampled, worker_bits.mask)
            begin = ends[longest - 1] if longest else 0
            end = ends[longest] - 1 if longest < len(ends) else begin
            rest = bit_sets(await self._get(hashes[begin:end])) if begin < end else ()
            return Matches(itertools.chain(spread(sampled[:longest], ends), rest), worker_bits)
        except FAILURES as error:
            log.debug("redis: lookup failed %s", fields(error=describe_error(error)))
            return None

    async def _get(self, hashes: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return the values of these spans. Raises one of FAILURES."""
        return await values_of(self._hot, [b"kv:" + value[:NAME_BYTES] for value in hashes], NUM_BYTES)

    @property
    def down(self) -> str:
        """The reason why lookups find nothing at present, even if none is made; empty while they work."""
        if self.is_disabled:
            return "another cluster secret is in use there"
        faults = (entry.unwritten_for for entry in self._workers.values() if entry.is_ours)
        is_late = self._is_slow or not self._breaker.is_closed
        return self._lost_for or next(filter(None, faults), "it does not answer in time" if is_late else "")

    # ---- beside the requests ----

    async def check_secret(self, fingerprint: bytes) -> None:
        """Compare this gateway's cluster secret with that of others, again at every heartbeat. Raises SecretDiffers."""
        self._fingerprint = fingerprint
        try:
            await self._hold_secret()
            await self._slots.read(now())
        except SecretDiffers:
            raise
        except FAILURES as error:
            log.warning("redis: no answer, serving without it %s", fields(error=describe_error(error)))
        if is_cancelled():  # redis-py may have swallowed it
            raise asyncio.CancelledError

    async def run(self) -> None:
        """Send heartbeats and write events, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks.start("redis heartbeat", self._beat, group=group)
                tasks.start("redis writer", self._write, group=group)
        finally:
            await self._hot.aclose()
            await self._control.aclose()

    async def _beat(self) -> None:
        while not is_cancelled():
            await self._beat_once()
            if not is_cancelled():
                await self._pause()

    async def _beat_once(self) -> None:
        """Send a heartbeat, and note why it failed if it did."""
        began_at = now()
        try:
            await self._heartbeat(began_at)
            if self._lost_for or self.is_disabled:
                log.info("redis: back")
            self._lost_for, self.is_disabled = "", False
        except SecretDiffers as error:
            if not self.is_disabled:
                log.error("redis: not used as long as this is so %s", fields(error=error))
            self.is_disabled = True
        except FAILURES as error:
            if not self._lost_for:
                log.warning("redis: lost, serving without it %s", fields(error=describe_error(error)))
            self._lost_for = fault_of(error)
            for entry in self._workers.values():
                entry.refreshed_at = _NEVER
        self._is_slow = now() - began_at > WRITER_TTL_S / 3

    async def _pause(self) -> None:
        """Wait until the next heartbeat is due, or a worker has joined."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_S):
                await self._joined.wait()
        self._joined.clear()

    async def _heartbeat(self, at: float) -> None:
        await self._hold_secret()
        for part in _parts(list(self._workers.values()), MAX_BATCH):
            await self._hold_writers(part)  # in parts, so that a name is renewed soon after its holder was read
        await self._slots.read(at)
        await self._hold_slots(at)
        await self._retire(at)
        for entry in self._workers.values():
            if entry.may_write(at) and at - entry.refreshed_at > _REFRESH_S:
                entry.refresh(at)
            if entry.pending:
                self._written.set()
        self._left = {worker: entry for worker, entry in self._left.items() if at - entry.left_at < GIVE_UP_S}
        if not self._breaker.is_closed:
            await self._try_lookups()

    async def _try_lookups(self) -> None:
        """Have lookups made again if two round trips, the most that one takes, fit into its budget."""
        began_at = now()
        found = [await self._ask([bytes(NAME_BYTES)]) for _ in range(2)]
        if None not in found and now() - began_at < BUDGET_S:
            self._breaker.succeeded()

    async def _retire(self, at: float) -> None:
        """Retire slots without a writer: those of lost workers, and those that a worker has beside its own."""
        own = {entry.worker: entry.slot for entry in self._workers.values() if entry.may_write(at)}
        await self._slots.retire(self._slots.slots_beside(own))
        await self._slots.retire_orphans(_writer_name, at)

    async def _hold_secret(self) -> None:
        if self._fingerprint is None:
            return
        await self._control.set("baton:secret", self._fingerprint, nx=True, ex=SECRET_TTL_S)
        if await self._value(b"baton:secret") not in (self._fingerprint, None):
            raise SecretDiffers("the gateways on this Redis have another cluster secret: give this one the same file")
        await self._control.expire("baton:secret", SECRET_TTL_S)

    async def _hold_writers(self, entries: Sequence[IndexedWorker]) -> None:
        """Make sure that one gateway writes each worker's events. If two do for a moment, both write the same."""
        names = [_writer_name(entry.worker) for entry in entries]
        holders = await values_of(self._control, names, _MAX_NAME_BYTES)
        asked = {}
        for entry, name, holder in zip(entries, names, holders, strict=True):
            if holder == self._gateway:
                asked[entry.worker] = methodcaller("expire", name, WRITER_TTL_S)
            elif holder is None and (entry.is_ours or not self._is_slow):  # else its writer may be just as slow
                asked[entry.worker] = methodcaller("set", name, self._gateway, nx=True, ex=WRITER_TTL_S)
        answers = await answers_of(self._control, list(asked.values()), _CONTROL_TIMEOUT_S)
        ours = {worker for worker, is_held in zip(asked, answers, strict=True) if is_held}
        for entry in entries:
            was_ours, entry.is_ours = entry.is_ours, entry.worker in ours
            if entry.is_ours and not was_ours:
                entry.feed.subscribe()

    async def _hold_slots(self, at: float) -> None:
        """Make sure that each worker whose events this gateway writes has a slot. The slots were read just now."""
        if self._slots.went_back():
            self._warn("it came back with what it had saved before, all is written again")
            for entry in (*self._workers.values(), *self._left.values()):
                entry.is_given_up = True
        ours = [entry for entry in self._workers.values() if entry.is_ours]
        own = {entry.worker: entry.slot for entry in ours if entry.slot is not None and entry.may_write(at)}
        renewed = await self._slots.renew(own)
        claimed = await self._slots.claim({worker: slot for worker, slot in own.items() if worker not in renewed})
        without = []
        for entry in ours:
            if entry.worker in renewed:
                entry.held_at = at
            elif entry.worker in claimed:  # Redis forgot the slot, so perhaps bits too
                entry.held_at, entry.refreshed_at = at, _NEVER
            else:
                entry.is_given_up = True  # even if no other slot can be leased now
                without.append(entry)
        if without:
            await self._lease_slots(without, at)
        if claimed or without:
            await self._slots.read(at)

    async def _lease_slots(self, entries: Sequence[IndexedWorker], at: float) -> None:
        await self._slots.give_up([entry.slot for entry in entries if entry.slot is not None])
        await self._slots.read(at)
        for part in _parts(entries, _LEASED_AT_ONCE):
            leased = await self._slots.lease([entry.worker for entry in part], at)
            for entry in part:
                entry.begin(leased.get(entry.worker), at)
                if entry.slot is None:
                    self._warn("no slot is free, a worker's spans are not shared", slots=NUM_SLOTS)

    async def _value(self, name: bytes) -> bytes | None:
        return (await values_of(self._control, [name], _MAX_NAME_BYTES))[0]

    async def _write(self) -> None:
        while not is_cancelled():
            await self._written.wait()
            await asyncio.sleep(_FLUSH_S)
            self._written.clear()
            for entry in list(self._workers.values()):
                if self._may_write(entry):
                    await self._write_pending(entry)

    async def _write_pending(self, entry: IndexedWorker) -> None:
        """Write what is pending; what fails, or may not be written now, waits for the next successful heartbeat."""
        slot, num_slots = entry.slot, entry.num_slots
        pending, entry.pending = list(entry.pending.items()), {}
        for begin in range(0, len(pending), BATCH):
            try:
                if not self._may_write(entry):
                    raise TimeoutError("the slots were not read for too long")
                await self._write_batch(slot, dict(pending[begin : begin + BATCH]))
                entry.unwritten_for = ""
            except FAILURES as error:
                self._warn("index events were not written", error=describe_error(error))
                if entry.num_slots == num_slots:
                    entry.unwritten_for = fault_of(error)
                    entry.put_back(dict(pending[begin:]))
                return
            if entry.num_slots != num_slots:
                return  # the worker has another slot, for which all that it holds is pending
            if entry.has_left_out:
                entry.is_given_up = True
                return

    def _may_write(self, entry: IndexedWorker) -> bool:
        at = now()
        return entry.may_write(at) and self._slots.are_known(at) and not self.is_disabled

    def _warn(self, text: str, **values: object) -> None:
        if now() - self._warned_at.get(text, _NEVER) > _LOG_INTERVAL_S:
            self._warned_at[text] = now()
            log.warning("redis: %s %s", text, fields(**values))

    async def _write_batch(self, slot: int, spans: Mapping[bytes, bool]) -> None:
        """Write one batch, wholly or not at all. Raises one of FAILURES, after which either may be the case."""
        names = {span: b"kv:" + span[:NAME_BYTES] for span in spans}
        retired, own = self._slots.retired, mask_of([slot])
        looked = [names[span] for span, sealed in spans.items() if retired or not sealed]
        bits = dict(zip(looked, bit_sets(await values_of(self._control, looked, NUM_BYTES)))) if looked else {}
        async with self._control.pipeline(transaction=True) as batch:
            self._slots.beat(batch)
            for span, sealed in spans.items():
                name = names[span]
                if not sealed and not bits[name] & ~retired & ~own:
                    batch.expire(name, 0)  # if another gateway wrote it meanwhile, that one writes it again in time
                    continue
                for other in slots_in(bits.get(name, 0) & retired):
                    batch.setbit(name, other, 0)  # before the time to live is renewed
                batch.setbit(name, slot, int(sealed))
                batch.expire(name, KV_TTL_S)
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):  # for all answers: the client's own timeout holds for each
                answers = await batch.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not is_wrong_type(answer):  # others than that key are written
                raise answer
        self._slots.note_beat(answers[0])


def _writer_name(worker: bytes) -> bytes:
    return b"baton:writer:" + worker


def _parts(entries: Sequence[IndexedWorker], most: int) -> Iterator[Sequence[IndexedWorker]]:
    return (entries[begin : begin + most] for begin in range(0, len(entries), most))
