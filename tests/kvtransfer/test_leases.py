import pytest

from kvtransfer.errors import LeaseExpired, TransferCancelled
from kvtransfer.layout import BlockRef
from kvtransfer.leases import LeaseTable, Watermark

NUM_TOKENS, NUM_LAYERS = 300, 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Table(LeaseTable):
    def __init__(self):
        self.clock, self.released = Clock(), []
        super().__init__(self.clock, self.released.append)

    def lease(self, key="k", ttl_s=5.0):
        blocks = [BlockRef(index, 1) for index in range(5)]
        return self.grant(
            key, blocks=blocks, num_tokens=NUM_TOKENS, num_layers=NUM_LAYERS, span_hashes=[bytes(32)] * 4,
            chain_parent=bytes(32), taker=(b"d", 1), ttl_s=ttl_s,
        )  # fmt: skip


def test_expires_once():
    table = Table()
    lease = table.lease()
    table.clock.now += 4.9
    assert table.expire() == 0 and table.find(lease.lease_id) is lease
    table.clock.now += 0.2
    assert table.expire() == 1 and table.released == ["k"]
    assert table.expire() == 0 and not table.renew(lease.lease_id)
    table.cancel("k"), table.release(lease.lease_id), table.finish("k"), table.close()
    assert table.released == ["k"] and len(table) == 0
    with pytest.raises(LeaseExpired):
        lease.check_alive()


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


def test_ends_when_confirmed_and_finished():
    for order in ((0, 1), (1, 0)):
        table = Table()
        lease = table.lease()
        steps = (lambda: table.finish("k"), lambda: table.confirm(lease))
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


def test_on_release_may_come_back():
    table = Table()
    table.lease()
    table._on_release = lambda key: (table.released.append(key), table.cancel(key))
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
