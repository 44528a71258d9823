import random
import time

import pytest

from kvtransfer.errors import LeaseExpired, ProtocolError, TicketRefused, TransferCancelled
from kvtransfer.layout import BlockRef, PromptKV
from kvtransfer.transfer.leases import LeaseTable, Watermark
from tests.support.kvtransfer.rig import running
from tests.support.waiting import until_async

NUM_TOKENS, NUM_LAYERS = 300, 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Table(LeaseTable):
    def __init__(self):
        self.clock, self.released = Clock(), []
        self.endings = []
        super().__init__(self.clock, lambda key, ending: (self.released.append(key), self.endings.append(ending)))

    def lease(self, key="k", ttl_s=5.0):
        blocks = tuple(BlockRef(index, 1) for index in range(5))
        prompt = PromptKV(NUM_TOKENS, blocks, (bytes(32),) * 4, bytes(32))
        lease = self.grant(key, prompt, num_layers=NUM_LAYERS, ttl_s=ttl_s)
        lease.add_fetch(b"first")
        return lease

    def take(self, lease, fetch_id=b"first", share=0, num_shares=1):
        """A whole dialogue."""
        fetch = lease.begin(fetch_id, share, num_shares)
        self.confirm(lease, fetch, share)
        self.leave(lease, fetch)


def test_expires_once():
    table = Table()
    lease = table.lease()
    table.clock.now += 4.9
    table.expire()
    assert table.find(lease.lease_id) is lease
    table.clock.now += 0.2
    for _ in range(2):
        table.expire()
        assert table.released == ["k"] and not table.renew(lease.lease_id)
    table.cancel("k"), table.withdraw(lease.lease_id, b"first"), table.finish("k"), table.close()
    assert table.released == ["k"] and len(table) == 0
    with pytest.raises(LeaseExpired):
        lease.check_alive()


async def test_a_ticket_of_another_rank_renews_the_lease():
    """As it did on the rank that has minted it: the lease is one, and lives as long on all of them."""
    table = Table()
    lease = table.lease()
    table.clock.now += 4.9
    table.admit("k", b"second")
    table.clock.now += 4.9
    assert table.find(lease.lease_id) is lease and b"second" in lease.fetches
    table.clock.now += 0.2
    table.admit("k", b"third")
    assert table.endings == ["expired"] and b"third" not in lease.fetches


async def test_a_lease_that_is_offered_again_is_renewed():
    """Its second taker has as long to come as the first had."""
    async with running("inproc", ttl_s=5.0) as rig:
        clock = rig.source._leases._clock = Clock()
        offer = rig.offer()
        clock.now += 4.9
        rig.source.offer_again(offer.lease_id, rig.make_fetcher(b"decode-1", 23).taker())
        clock.now += 4.9
        assert rig.source.renew(offer.lease_id)


def test_renewal_counts_from_now():
    table = Table()
    lease = table.lease()
    for _ in range(3):
        table.clock.now += 4
        assert table.renew(lease.lease_id)
    table.clock.now += 5
    with pytest.raises(LeaseExpired):  # found late, ends before the reaper comes
        table.find(lease.lease_id)
    assert table.released == ["k"]


@pytest.mark.parametrize("found_by", ["a taker", "the reaper"])
async def test_a_lease_that_expires_is_counted_whoever_finds_it(found_by):
    async with running("inproc", ttl_s=0.01) as rig:
        offer = rig.offer()
        if found_by == "a taker":
            time.sleep(0.02)  # the reaper does not come before it
            assert not rig.source.renew(offer.lease_id)
        await until_async(lambda: rig.released, "the lease has ended")
        assert rig.source.counters["leases_expired"] == 1 and rig.endings == {"k": "expired"}


def test_ends_when_confirmed_and_finished():
    for order in ((0, 1), (1, 0)):
        table = Table()
        lease = table.lease()
        steps = (lambda: table.finish("k"), lambda: table.take(lease))
        steps[order[0]]()
        assert table.released == []
        steps[order[1]]()
        assert table.released == ["k"] and lease.ending == "released" and lease.changed.is_set()


def test_cancel_wakes_the_dialogue():
    table = Table()
    lease = table.lease()
    table.cancel("k")
    assert lease.changed.is_set() and table.released == ["k"]
    with pytest.raises(TransferCancelled):
        lease.check_alive()


def test_on_lease_end_may_come_back():
    table = Table()
    table.lease()
    table._on_lease_end = lambda key, ending: (table.released.append(key), table.cancel(key))
    table.cancel("k")
    assert table.released == ["k"]


def test_one_lease_per_key():
    table = Table()
    table.lease()
    with pytest.raises(ValueError, match="has a lease"):
        table.lease()
    table.cancel("k")
    table.lease()


def test_watermark_by_chunks_and_layers():
    lease = Table().lease()
    seen = []
    for upto in ((64,), (128, 1), (128, 3), (128, 4), (150,), (200, 2), (192, 2), (300, NUM_LAYERS)):
        lease.advance(*upto)
        seen.append(tuple(lease.watermark))
    assert seen == [
        (64, 64, 4), (64, 128, 1), (64, 128, 3), (128, 128, 4), (128, 128, 4), (128, 192, 2), (128, 192, 2),
        (300, 300, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("bad", ((64,), (128, 1), (192, 3), (301,), (256, 5), (-1,)))
def test_watermark_never_goes_back_or_out(bad):
    lease = Table().lease()
    lease.advance(64)
    lease.advance(128, 2)
    with pytest.raises(ValueError, match="watermark"):
        lease.advance(*bad)
    assert lease.watermark == Watermark(64, 128, 2)


def test_finish_is_the_last_word():
    table = Table()
    lease = table.lease()
    table.finish("k")
    assert lease.watermark == Watermark(NUM_TOKENS, NUM_TOKENS, NUM_LAYERS)
    table.finish("unknown")


# ---- several takers ----


def test_waits_for_all_shares_of_a_fetch():
    table = Table()
    lease = table.lease()
    table.finish("k")
    for share in range(3):
        assert table.released == []
        table.take(lease, share=share, num_shares=3)
    assert table.endings == ["released"]


def test_waits_for_every_taker_that_may_still_come():
    table = Table()
    lease = table.lease()
    lease.add_fetch(b"second")
    table.finish("k")
    table.take(lease)
    assert table.released == [], "a ticket is out that was not shown"
    table.take(lease, b"second")
    assert table.endings == ["released"]


def test_does_not_wait_for_a_taker_that_was_lost():
    table = Table()
    lease = table.lease()
    lease.add_fetch(b"second")
    table.finish("k")
    lost = lease.begin(b"first", 0, 1)
    table.take(lease, b"second")
    assert table.released == [], "its dialogue is open"
    table.leave(lease, lost)
    assert table.endings == ["released"]


def test_nobody_has_taken_it():
    table = Table()
    lease = table.lease()
    table.finish("k")
    table.leave(lease, lease.begin(b"first", 0, 1))
    assert table.released == [], "its taker may come back on another connection"
    table.clock.now += 6
    table.expire()
    assert table.endings == ["expired"]


def test_taken_and_waiting_for_a_ticket_that_is_never_shown():
    table = Table()
    lease = table.lease()
    lease.add_fetch(b"second")
    table.finish("k")
    table.take(lease)
    table.clock.now += 6
    table.expire()
    assert table.endings == ["released"]


def test_a_withdrawn_fetch_releases_its_lease():
    table = Table()
    lease = table.lease()
    lease.add_fetch(b"second")
    table.finish("k")
    table.take(lease)
    table.withdraw(lease.lease_id, b"second")
    assert table.endings == ["released"]
    with pytest.raises(TicketRefused):
        lease.begin(b"second", 0, 1)


def test_a_fetch_that_is_over_does_not_begin_again():
    table = Table()
    lease = table.lease()
    table.take(lease)
    with pytest.raises(TicketRefused):
        lease.begin(b"first", 0, 1)
    with pytest.raises(TicketRefused):
        lease.begin(b"unknown", 0, 1)


@pytest.mark.parametrize("share, num_shares", ((0, 0), (2, 2), (0, 3)))
def test_shares_that_contradict_each_other(share, num_shares):
    lease = Table().lease()
    lease.begin(b"first", 0, 2)
    with pytest.raises(ProtocolError):
        lease.begin(b"first", share, num_shares)


def test_tickets_are_bounded():
    lease = Table().lease()
    with pytest.raises(ValueError, match="at most"):
        for index in range(1000):
            lease.add_fetch(index.to_bytes(16))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_lease_ends_once(seed):
    """Random operations on a few leases; at the end of time all are gone, each reported exactly once and rightly."""
    rng, table = random.Random(seed), Table()
    leases, open_dialogues, granted = {}, [], []
    for step in range(200):
        match rng.randrange(9):
            case 0:
                key = f"{step}"
                leases[key] = table.lease(key, ttl_s=rng.choice((1.0, 5.0)))
                granted.append(key)
            case 1 if leases:
                rng.choice(list(leases.values())).add_fetch(rng.randbytes(4))
            case 2 | 3 if leases:
                lease = rng.choice(list(leases.values()))
                try:
                    fetch_id = rng.choice(list(lease.fetches))
                    open_dialogues.append((lease, lease.begin(fetch_id, rng.randrange(2), 2), rng.randrange(2)))
                except (TicketRefused, ProtocolError, IndexError):
                    pass
            case 4 if open_dialogues:
                lease, fetch, share = open_dialogues.pop(rng.randrange(len(open_dialogues)))
                if rng.randrange(2):
                    table.confirm(lease, fetch, share)
                table.leave(lease, fetch)
            case 5 if leases:
                table.finish(rng.choice(list(leases)))
            case 6 if leases and rng.randrange(3) == 0:
                table.cancel(rng.choice(list(leases)))
            case 7:
                table.clock.now += rng.choice((0.1, 0.7))
                table.expire()
            case 8 if leases:
                lease = rng.choice(list(leases.values()))
                table.renew(lease.lease_id) if rng.randrange(2) else table.withdraw(lease.lease_id, b"first")
        assert len(table.released) == len(set(table.released)) == len(granted) - len(table)
        for key, ending in zip(table.released, table.endings):
            assert ending != "released" or (leases[key].is_taken and leases[key].is_finished)
            assert leases[key].ending == ending
    table.clock.now += 10
    table.expire()
    assert len(table) == 0 and sorted(table.released) == sorted(granted)
