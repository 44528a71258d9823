"""Lease slots of the index in Redis: bits of its values, each for one worker.

    baton:slot:<n>     the worker (instance, epoch) that has slot n, or `retired`; expires

A slot is for one worker and for one writer of its events, which knows each bit that was set. Another writer, or one
that Redis did not hear for a while, cannot know which bits to clear: it retires the slot and leases another. So
does any gateway with the slot of a worker that has no writer any more. Bits of a retired slot mean nothing; before a
span's time to live is renewed they are cleared, so that none is left when the slot is free.
"""

from collections.abc import Callable, Iterator

from gateway.prefix.prefix_matches import NOWHERE, WorkerBits
from gateway.prefix.worker_bitmap import NUM_SLOTS, mask_of, places_of
from gateway.store.redis_client import values_of

KV_TTL_S = 600
# Longer than the last span lives that was renewed by a gateway which did not know yet that the slot was retired.
SLOT_TTL_S = KV_TTL_S + 120
GIVE_UP_S = 30.0  # without a word from Redis: then a writer leases another slot
ORPHAN_S = 60.0  # without a writer: then a slot is retired, long after its writer has given it up
KNOWN_S = 5.0  # how long what was read of the slots counts
RETIRED = b"retired"
_MAX_NAME_BYTES = 64
_LOOK_S = 10.0  # between two looks for slots of workers without a writer


class SlotLeases:
    """Every method raises one of FAILURES. `at` is the time now, of any clock that does not go back."""

    def __init__(self, client):
        self.places: WorkerBits = NOWHERE
        self.retired = 0  # bits, as of bit_sets
        self._client = client
        self._holders: list[bytes | None] = [None] * NUM_SLOTS
        self._read_at = self._looked_at = float("-inf")
        self._seen: dict[int, float] = {}  # slots that have or had a worker, when last
        self._unwritten: dict[bytes, float] = {}  # workers that have a slot and no writer, since when

    def are_known(self, at: float) -> bool:
        return at - self._read_at < KNOWN_S

    def may_be_looked_up(self, at: float) -> bool:
        """Return whether the slots that were read last may be used: they are valid for all spans that have not
        expired."""
        return bool(self.places.mask) and at - self._read_at < KV_TTL_S

    async def read(self, at: float) -> None:
        self._holders = await values_of(self._client, [_name(slot) for slot in range(NUM_SLOTS)], _MAX_NAME_BYTES)
        self.places = places_of([None if holder == RETIRED else holder for holder in self._holders])
        self.retired = mask_of(slot for slot, holder in enumerate(self._holders) if holder == RETIRED)
        self._seen.update((slot, at) for slot, holder in enumerate(self._holders) if holder is not None)
        self._read_at = at

    async def renew(self, worker: bytes, slot: int) -> bool:
        """Renew this worker's slot; return whether it still has it."""
        (holder,) = await values_of(self._client, [_name(slot)], _MAX_NAME_BYTES)
        return holder == worker and bool(await self._client.expire(_name(slot), SLOT_TTL_S))

    async def take(self, worker: bytes, slot: int) -> bool:
        """Take a slot that is free; return whether it was. After Redis has forgotten a slot it is taken again in this
        way, perhaps without its bits."""
        return bool(await self._client.set(_name(slot), worker, nx=True, ex=SLOT_TTL_S))

    async def lease(self, worker: bytes, at: float) -> int | None:
        """Return a slot without bits, or None if there is none. Slots that the worker had before are retired."""
        await self.read(at)
        for slot in self.slots_of(worker):
            await self.retire(slot)
        for slot in range(NUM_SLOTS):
            # One that had a worker a moment ago is left to it: Redis was emptied, and it comes back for it.
            if at - self._seen.get(slot, float("-inf")) > GIVE_UP_S and await self.take(worker, slot):
                return slot
        return None

    async def give_up(self, slot: int) -> None:
        """Retire a slot whose writer has heard nothing of it for a while: Redis may have forgotten it, and bits may be
        written."""
        await self._client.set(_name(slot), RETIRED, nx=True, ex=SLOT_TTL_S)

    async def retire(self, slot: int) -> None:
        await self._client.set(_name(slot), RETIRED, xx=True, ex=SLOT_TTL_S)

    def slots_of(self, worker: bytes) -> Iterator[int]:
        return (slot for slot, holder in enumerate(self._holders) if holder == worker)

    async def retire_orphans(self, writer_name: Callable[[bytes], bytes], at: float) -> None:
        """Retire slots of workers for which `writer_name(worker)` has been missing for ORPHAN_S."""
        if at - self._looked_at < min(_LOOK_S, ORPHAN_S / 4):
            return
        self._looked_at, workers = at, list(self.places.place_of)
        writers = await values_of(self._client, list(map(writer_name, workers)), _MAX_NAME_BYTES) if workers else []
        missing = [worker for worker, writer in zip(workers, writers, strict=True) if writer is None]
        self._unwritten = {worker: self._unwritten.get(worker, at) for worker in missing}
        for worker, since in self._unwritten.items():
            for slot in self.slots_of(worker) if at - since >= ORPHAN_S else ():
                await self.retire(slot)


def _name(slot: int) -> bytes:
    return b"baton:slot:%d" % slot
