"""The ledger under random operations: the invariant after every one."""

import random
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engine.kv.ledger import Holder, Ledger, LedgerError

SPAN = 64


def names(*values: int) -> tuple[bytes, ...]:
    return tuple(value.to_bytes(32, "big") for value in values)


class Model:
    """A model of the holders, kept beside the ledger and compared with it after every operation."""

    def __init__(self, num_blocks: int, block_size: int, seed: int):
        self.ledger = Ledger(num_blocks, block_size)
        self.random = random.Random(seed)
        self.held: list[tuple[Holder, list[int]]] = []
        self.promised = 0
        self.named: list[tuple[bytes, ...]] = []

    def check(self):
        self.ledger.check_integrity()
        self.ledger.check_holders(self.held)
        assert sum(self.ledger.counts().values()) == self.ledger.num_blocks
        assert self.ledger.num_reserved == self.promised
        assert self.ledger.num_available >= 0

    def step(self):
        verbs = ["take", "take", "share", "give", "give", "move", "seal", "match", "promise"]
        getattr(self, self.random.choice(verbs))()
        self.check()

    def take(self):
        holder = self.random.choice([Holder.RUNNING, Holder.LEASED, Holder.FETCHING])
        num = self.random.randint(0, 6)
        reserved = self.random.randint(0, min(num, self.promised))
        fits = num - reserved <= self.ledger.num_available
        before = {block_id: self.ledger.generation(block_id) for block_id in range(self.ledger.num_blocks)}
        block_ids = self.ledger.allocate(num, holder, reserved)
        assert (block_ids is not None) == fits
        if block_ids is not None:
            assert len(set(block_ids)) == num
            assert all(self.ledger.generation(block_id) == before[block_id] + 1 for block_id in block_ids)
            assert not any(block_id in ids for block_id in block_ids for _, ids in self.held)
            self.promised -= reserved
            self.held.append((holder, block_ids))

    def share(self):
        if self.held:
            holder, block_ids = self.random.choice(self.held)
            if holder in (Holder.RUNNING, Holder.LEASED):
                assert self.ledger.share(block_ids, Holder.RUNNING)
                self.held.append((Holder.RUNNING, list(block_ids)))

    def give(self):
        if self.held:
            holder, block_ids = self.held.pop(self.random.randrange(len(self.held)))
            self.ledger.release(block_ids, holder)

    def move(self):
        fetching = [index for index, (holder, _) in enumerate(self.held) if holder is Holder.FETCHING]
        if fetching:
            index = self.random.choice(fetching)
            target = self.random.choice([Holder.RUNNING, Holder.QUARANTINED])
            self.ledger.move(self.held[index][1], Holder.FETCHING, target)
            self.held[index] = (target, self.held[index][1])

    def seal(self):
        per_unit = self.ledger.cache.blocks_per_unit
        for holder, block_ids in self.held:
            if holder in (Holder.RUNNING, Holder.LEASED) and len(block_ids) >= per_unit:
                first = self.random.randrange(40) * 8
                spans = names(*range(first, first + self.ledger.cache.spans_per_unit))
                if self.ledger.seal(spans, tuple(block_ids[:per_unit])):
                    self.named.append(spans)
                return

    def match(self):
        if self.named:
            spans = self.random.choice(self.named)
            block_ids = self.ledger.find(spans, len(spans) * SPAN + 1)
            if self.ledger.share(block_ids, Holder.RUNNING):
                self.held.append((Holder.RUNNING, block_ids))

    def promise(self):
        if self.promised and self.random.random() < 0.5:
            num = self.random.randint(1, self.promised)
            self.ledger.unreserve(num)
            self.promised -= num
        else:
            num = self.random.randint(0, 5)
            fits = num <= self.ledger.num_available
            assert self.ledger.reserve(num) == fits
            self.promised += num if fits else 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.sampled_from([16, 32, 64, 128]), st.integers(1, 24))
def test_random_operations_keep_the_invariant(seed, block_size, num_blocks):
    model = Model(num_blocks, block_size, seed)
    for _ in range(80):
        model.step()
    for holder, block_ids in model.held:
        model.ledger.release(block_ids, holder)
    model.ledger.unreserve(model.promised)
    model.ledger.check_integrity()
    assert model.ledger.num_available == num_blocks


def test_strongest_holder_counts():
    ledger = Ledger(4, 64)
    block_ids = ledger.allocate(1, Holder.RUNNING)
    for holder in (Holder.LEASED, Holder.FETCHING, Holder.QUARANTINED):
        ledger.share(block_ids, holder)
        assert ledger.counts()[holder.name.lower()] == 1
    for holder in (Holder.QUARANTINED, Holder.FETCHING, Holder.LEASED):
        ledger.release(block_ids, holder)
    assert ledger.counts() == {"quarantined": 0, "fetching": 0, "leased": 0, "running": 1, "cached": 0, "free": 3}


def test_free_blocks_go_before_cached_ones_and_the_oldest_cached_first():
    ledger = Ledger(3, 64)
    old, new = ledger.allocate(1, Holder.RUNNING), ledger.allocate(1, Holder.RUNNING)
    ledger.seal(names(1), tuple(old))
    ledger.seal(names(2), tuple(new))
    ledger.release(old, Holder.RUNNING)
    ledger.release(new, Holder.RUNNING)
    assert ledger.num_available == 3
    (free,) = ledger.allocate(1, Holder.RUNNING)
    assert free not in old + new and not ledger.block_events()[1]
    assert ledger.allocate(1, Holder.RUNNING) == old
    assert ledger.find(names(1), 65) == [] and ledger.find(names(2), 65) == new


def test_a_chain_is_evicted_from_its_end():
    ledger = Ledger(4, 32)
    block_ids = ledger.allocate(4, Holder.RUNNING)
    ledger.seal(names(1), tuple(block_ids[:2]))
    ledger.seal(names(2), tuple(block_ids[2:]))
    ledger.release(block_ids, Holder.RUNNING)
    ledger.allocate(1, Holder.RUNNING)
    assert ledger.find(names(1, 2), 200) == block_ids[:2]


def test_promised_blocks_are_not_given_to_others():
    ledger = Ledger(4, 64)
    assert ledger.reserve(3)
    assert ledger.allocate(2, Holder.RUNNING) is None
    assert not ledger.reserve(2)
    assert len(ledger.allocate(3, Holder.FETCHING, reserved=3)) == 3
    assert ledger.num_available == 1


def test_a_cached_prefix_cannot_be_pinned_out_of_a_promise():
    ledger = Ledger(1, 64)
    block_ids = ledger.allocate(1, Holder.RUNNING)
    ledger.seal(names(1), tuple(block_ids))
    ledger.release(block_ids, Holder.RUNNING)
    assert ledger.reserve(1)
    assert not ledger.share(block_ids, Holder.RUNNING)
    ledger.check_integrity()


def test_giving_back_what_is_not_held_is_an_error():
    ledger = Ledger(2, 64)
    block_ids = ledger.allocate(1, Holder.RUNNING)
    for wrong in (Holder.LEASED, Holder.FETCHING):
        with pytest.raises(LedgerError, match="no .* holder"):
            ledger.release(block_ids, wrong)
    ledger.release(block_ids, Holder.RUNNING)
    with pytest.raises(LedgerError):
        ledger.release(block_ids, Holder.RUNNING)
    with pytest.raises(LedgerError, match="free block"):
        ledger.share(block_ids, Holder.RUNNING)
    with pytest.raises(LedgerError, match="have no holder"):
        ledger.seal(names(1), tuple(block_ids))
    ledger.check_integrity()


def test_many_threads():
    ledger = Ledger(64, 32)

    def work(seed: int):
        chance = random.Random(seed)
        for _ in range(300):
            block_ids = ledger.allocate(chance.randint(1, 8), Holder.RUNNING)
            if block_ids is not None:
                ledger.share(block_ids, Holder.LEASED)
                ledger.release(block_ids, Holder.RUNNING)
                ledger.release(block_ids, Holder.LEASED)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.check_integrity()
    assert ledger.num_available == 64
