"""Lease slots of the index in Redis: bits of its values, each for one worker.

    baton:slot:<n>          the worker (instance, epoch) that has slot n, or `retired`; expires
    baton:beat:<gateway>    how many batches of bits this gateway has written; expires

A slot is for one worker and for one writer of its events, which knows each bit that was set. Another writer, or one
whom Redis did not hear for a while, cannot know which bits to clear, so it retires the slot and leases another. Any
gateway does the same with the slot of a worker that has no writer any more. Bits of a retired slot mean nothing. They
are cleared before a span's time to live is renewed, so that none is left when the slot is free again.

A Redis that was restored from an older copy has old bits. Its counter of batches is old too, which shows this: each
batch reads the counter and writes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import TypeGuard

from gateway.prefix.prefix_matches import NO_WORKERS, WorkerBits
from gateway.prefix.worker_bitmap import NUM_SLOTS, mask_of, worker_bits_of
from gateway.store.redis_client import Pipeline, answers_of, values_of

KV_TTL_S = 600
# Longer than any span lives that a gateway renewed before it knew that the slot was retired.
SLOT_TTL_S = KV_TTL_S + 120
GIVE_UP_S = 30.0  # without an answer of Redis: then a writer leases another slot
ORPHAN_S = 60.0  # without a writer: then a slot is retired, long after its writer has given it up
KNOWN_S = 5.0  # how long the slots that were read are valid
RETIRED = b"retired"
_MAX_NAME_BYTES = 64
_LOOK_S = 10.0  # between two searches for slots of workers without a writer


class SlotLeases:
    """Lease, renew and retire slots. Every method may raise one of FAILURES. `at` is the present on any monotonic
    clock."""

    def __init__(self, client, timeout_s: float, gateway: bytes):
        self.worker_bits: WorkerBits = NO_WORKERS
        self.retired = 0  # bits, as of bit_sets
        self._client, self._timeout_s = client, timeout_s
        self._beat_name, self._num_beats = b"baton:beat:" + gateway, 0  # batches that Redis has confirmed
        self._went_back = False  # Redis was seen behind that number
        self._holders: list[bytes | None] = [None] * NUM_SLOTS
        self._read_at = self._looked_at = float("-inf")
        self._seen: dict[int, float] = {}  # slot -> when it last had a worker
        self._unwritten: dict[bytes, float] = {}  # worker with a slot and no writer -> since when

    def are_known(self, at: float) -> bool:
        """Return whether the slots were read recently enough to be written."""
        return at - self._read_at < KNOWN_S

    def may_be_looked_up(self, at: float) -> bool:
        """Return whether lookups may use the slots that were read last: they are valid for all spans that have not
        expired."""
        return bool(self.worker_bits.mask) and at - self._read_at < KV_TTL_S

    async def read(self, at: float) -> None:
        """Read which worker has which slot, and whether Redis was restored from an older copy."""
        names, num_beats = [*map(_name, range(NUM_SLOTS)), self._beat_name], self._num_beats
        *self._holders, beat = await values_of(self._client, names, _MAX_NAME_BYTES)
        if _is_behind(beat, num_beats):
            self._went_back, self._num_beats = True, int(beat)
        self.worker_bits = worker_bits_of([None if holder == RETIRED else holder for holder in self._holders])
        self.retired = mask_of(slot for slot, holder in enumerate(self._holders) if holder == RETIRED)
        self._seen.update((slot, at) for slot, holder in enumerate(self._holders) if holder is not None)
        self._read_at = at

    async def renew(self, slots: Mapping[bytes, int]) -> set[bytes]:
        """Renew the slots that these workers had when the slots were read; return the workers that still have
        theirs."""
        workers = [worker for worker, slot in slots.items() if self._holders[slot] == worker]
        answers = await self._ask([methodcaller("expire", _name(slots[worker]), SLOT_TTL_S) for worker in workers])
        return {worker for worker, is_there in zip(workers, answers, strict=True) if is_there}

    def beat(self, batch: Pipeline) -> None:
        """Begin a batch of bits: read the counter of batches and raise it. Only one batch is written at a time."""
        batch.getrange(self._beat_name, 0, _MAX_NAME_BYTES)
        batch.set(self._beat_name, self._num_beats + 1, ex=SLOT_TTL_S)

    def note_beat(self, before: object) -> None:
        """Count a batch that Redis has confirmed, and that found the counter `before`."""
        if _is_behind(before, self._num_beats):
            self._went_back = True
        self._num_beats += 1

    def went_back(self) -> bool:
        """Return, once for each time, whether Redis has forgotten batches that it had confirmed. Then no slot may be
        kept: bits written since are missing, and bits cleared since are there."""
        went_back, self._went_back = self._went_back, False
        return went_back

    async def claim(self, slots: Mapping[bytes, int]) -> set[bytes]:
        """Claim free slots for workers; return the workers whose slot was free. A slot that Redis has forgotten is
        claimed again in this way, perhaps without its bits."""
        answers = await self._ask(
            [methodcaller("set", _name(slot), worker, nx=True, ex=SLOT_TTL_S) for worker, slot in slots.items()]
        )
        return {worker for worker, is_claimed in zip(slots, answers, strict=True) if is_claimed}

    async def lease(self, workers: Sequence[bytes], at: float) -> dict[bytes, int]:
        """Lease empty slots to the workers, as far as slots are free; return slot by worker. Slots that they had before
        are retired."""
        await self.retire(self.slots_beside(dict.fromkeys(workers)))
        leased: dict[bytes, int] = {}
        while len(leased) < len(workers) and (free := self._free(at)):
            asked = dict(zip([worker for worker in workers if worker not in leased], free))
            leased.update((worker, asked[worker]) for worker in await self.claim(asked))
            self._seen.update(dict.fromkeys(asked.values(), at))  # also if another gateway was faster
        return leased

    def _free(self, at: float) -> list[int]:
        """Return the slots that may be leased. A slot that had a worker a moment ago is kept for it: Redis was emptied,
        and the worker's gateway takes it again."""
        return [slot for slot in range(NUM_SLOTS) if at - self._seen.get(slot, float("-inf")) > GIVE_UP_S]

    async def give_up(self, slots: Iterable[int]) -> None:
        """Retire slots that their writer could not renew for a while. Redis may have forgotten them, and may have bits
        of them."""
        await self._ask([methodcaller("set", _name(slot), RETIRED, nx=True, ex=SLOT_TTL_S) for slot in slots])

    async def retire(self, slots: Iterable[int]) -> None:
        """Retire slots that a worker has in Redis."""
        await self._ask([methodcaller("set", _name(slot), RETIRED, xx=True, ex=SLOT_TTL_S) for slot in slots])

    def slots_beside(self, own: Mapping[bytes, int | None]) -> list[int]:
        """Return the slots that these workers have in Redis beside their own."""
        holders = enumerate(self._holders)
        return [slot for slot, holder in holders if holder is not None and own.get(holder, slot) != slot]

    async def _ask(self, commands: Sequence[Callable]) -> list[object]:
        return await answers_of(self._client, commands, self._timeout_s)

    async def retire_orphans(self, writer_name: Callable[[bytes], bytes], at: float) -> None:
        """Retire slots of workers for which `writer_name(worker)` has been missing for ORPHAN_S."""
        if at - self._looked_at < min(_LOOK_S, ORPHAN_S / 4):
            return
        self._looked_at, workers = at, list(self.worker_bits.bit_of)
        writers = await values_of(self._client, list(map(writer_name, workers)), _MAX_NAME_BYTES) if workers else []
        missing = [worker for worker, writer in zip(workers, writers, strict=True) if writer is None]
        self._unwritten = {worker: self._unwritten.get(worker, at) for worker in missing}
        orphans = [worker for worker, since in self._unwritten.items() if at - since >= ORPHAN_S]
        await self.retire(self.slots_beside(dict.fromkeys(orphans)))


def _is_behind(beat: object, num_beats: int) -> TypeGuard[bytes]:
    return isinstance(beat, bytes) and beat.isdigit() and int(beat) < num_beats


def _name(slot: int) -> bytes:
    return b"baton:slot:%d" % slot
