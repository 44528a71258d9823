"""A lease of several ranks: over when it is over everywhere, once, whichever of them ends it first."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.worker.ranks.leases import RankedSource
from baton.worker.ranks.rank_pools import KVRank, gives, sharding_of
from baton.worker.ranks.source import RankSource
from kvtransfer.errors import LeaseExpired
from kvtransfer.layout import BlockRef, Box, KVGroup, KVLayout, PromptKV, Taker
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.leases import LeaseEnding
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.endpoints import Address
from kvtransfer.wire import decode_handle

LAYOUT = KVLayout((KVGroup("paged", 2, 2, 8, "bf16", 16),))
KEY, INSTANCE = "key", b"i" * 16
TAKER = Taker(b"t" * 16, 2, LAYOUT, "exact")
SETTINGS: Any = {}  # of which ranks on GPUs of the host have need


@dataclass
class Rank:
    """What a rank was told."""

    notes: list[dict] = field(default_factory=list)

    def send_note(self, note: dict) -> None:
        self.notes.append(note)

    def was_told(self, what: str) -> bool:
        return any(what in note for note in self.notes)


def of_heads(layout: KVLayout, degree: int) -> Sharding:
    """What each of so many ranks has."""
    config: Any = SimpleNamespace(tensor_parallel=degree, pipeline_parallel=1)
    return sharding_of(layout, config, cast(Any, None), 0)


class GroupHarness:
    """A lease on four ranks of two KV heads: the second one's are the first one's, the fourth one's the third one's."""

    def __init__(self):
        self.endings: list[str] = []
        self.ranks = [Rank(), Rank(), Rank()]
        own = of_heads(LAYOUT, 4)
        boxes = gives(own)
        streams = [KVRank(rank, box) for rank, box in zip(self.ranks, boxes[1:], strict=True)]
        self.source = RankedSource(streams, lambda key, ending: self.endings.append(ending))
        self.own = self.source.own = Source(
            LocalPool.of(bytearray(8 * own.pool_layout.block_bytes), own),
            SourceIdentity(INSTANCE, 1, b"m" * 32, "exact"), "host", self.source.own_lease_ended,
            generations=lambda block: 0, transports=("tcp",), mint=TicketMint(self.source.mint_key),
        )  # fmt: skip

    async def open(self) -> "GroupHarness":
        identity = self.own.identity
        starting = asyncio.create_task(self.source.start(identity, 5.0, False, SETTINGS))
        await asyncio.sleep(0)
        for index in range(3):
            self.source.handle_note(index, {"endpoints": [["tcp", f"rank:{index + 1}", "host"]]})
        await starting
        offer = self.source.offer(KEY, PromptKV(16, (BlockRef(0, 0),), (), b"p" * 32), TAKER)
        self.handle, self.lease = decode_handle(offer.handle), offer.lease_id
        return self

    def own_ends(self, ending: str) -> None:
        table = self.own._leases
        table._end(table.of(KEY), ending)

    def rank_ends(self, ending: str) -> None:
        """The third rank, which alone has the second head."""
        self.source.handle_note(1, {"over": self.lease.hex(), "ending": ending})


async def test_the_handle_of_a_group_names_each_head_once():
    harness = await GroupHarness().open()
    assert [part.heads for part in harness.handle.parts] == [range(1), range(1, 2)]
    assert [endpoint.address for part in harness.handle.parts[1:] for endpoint in part.endpoints] == ["rank:2"]
    assert [rank.was_told("offer") for rank in harness.ranks] == [False, True, False]
    assert all(rank.was_told("open") for rank in harness.ranks)


@pytest.mark.parametrize("first", ["own", "rank"])
async def test_released_when_the_last_has_released_it(first):
    harness = await GroupHarness().open()
    ends = [harness.own_ends, harness.rank_ends]
    for end in ends if first == "own" else reversed(ends):
        assert not harness.endings
        end(LeaseEnding.RELEASED)
    assert harness.endings == [LeaseEnding.RELEASED] and not harness.ranks[1].was_told("cancel")
    harness.source.cancel(KEY)
    assert harness.endings == [LeaseEnding.RELEASED]


@pytest.mark.parametrize("how", ["cancel", LeaseEnding.EXPIRED])
async def test_given_up_it_is_over_when_no_rank_serves_it_any_more(how):
    """Blocks that were someone else's by then could be confirmed by a rank that has not heard yet."""
    harness = await GroupHarness().open()
    harness.source.cancel(KEY) if how == "cancel" else harness.own_ends(how)
    assert harness.ranks[1].was_told("cancel") and not harness.endings
    harness.rank_ends(LeaseEnding.CANCELLED)
    assert harness.endings == [LeaseEnding.CANCELLED if how == "cancel" else LeaseEnding.EXPIRED]


async def test_a_rank_gives_it_up():
    """While the worker's own lives, and once that has been released."""
    harness = await GroupHarness().open()
    harness.rank_ends(LeaseEnding.EXPIRED)
    assert harness.endings == [LeaseEnding.EXPIRED] and harness.own.num_leases == 0
    harness = await GroupHarness().open()
    harness.own_ends(LeaseEnding.RELEASED)
    harness.rank_ends(LeaseEnding.EXPIRED)
    assert harness.endings == [LeaseEnding.EXPIRED]


async def test_cancelled_where_a_rank_alone_still_has_it():
    harness = await GroupHarness().open()
    harness.own_ends(LeaseEnding.RELEASED)
    harness.source.cancel(KEY)
    assert harness.ranks[1].was_told("cancel") and not harness.endings
    harness.rank_ends(LeaseEnding.RELEASED)  # it had everything when it heard
    assert harness.endings == [LeaseEnding.CANCELLED]


async def test_offered_again_while_every_rank_has_it():
    """The ticket would be refused where it has been released."""
    harness = await GroupHarness().open()
    offer = harness.source.offer_again(harness.lease, TAKER)
    assert harness.ranks[1].notes[-1] == {"admit": harness.lease.hex(), "ticket": offer.ticket.hex()}
    harness.rank_ends(LeaseEnding.RELEASED)
    num_notes, num_tickets = len(harness.ranks[1].notes), harness.own.num_tickets
    with pytest.raises(LeaseExpired):
        harness.source.offer_again(harness.lease, TAKER)
    assert len(harness.ranks[1].notes) == num_notes and harness.own.num_tickets == num_tickets
    with pytest.raises(LeaseExpired):
        harness.source.offer_again(b"unknown", TAKER)


async def test_a_rank_that_cannot_listen():
    harness = GroupHarness()
    starting = asyncio.create_task(harness.source.start(harness.own.identity, 5.0, False, SETTINGS))
    await asyncio.sleep(0)
    harness.source.handle_note(0, {"closed": "no KV sockets can be made in /nowhere"})
    with pytest.raises(OSError, match="no KV sockets can be made in /nowhere"):
        await starting


async def test_a_rank_that_cannot_make_its_source_says_why():
    def make(**settings) -> Source:
        raise ValueError("no such transport: tpc")

    rank = Rank()
    source = RankSource(make, Address("127.0.0.1"), rank.send_note)
    order = {"instance": "00", "epoch": 1, "model": "00", "numerics": "exact", "mint": "00" * 32, "ttl_s": 5.0}
    source.handle_note({"open": order | {"is_strict": False, "settings": SETTINGS}})
    await asyncio.wait([cast(asyncio.Task, source._opening)])
    assert rank.notes == [{"closed": "no such transport: tpc"}]


def test_parts_of_ranks():
    """Of latent attention, and of fewer heads than ranks, the first one that has something gives it."""
    eight = KVLayout((KVGroup("paged", 3, 8, 8, "bf16", 16),))
    assert [box.heads for box in gives(of_heads(eight, 4))] == [range(begin, begin + 2) for begin in (0, 2, 4, 6)]
    latent = KVLayout((KVGroup("latent", 3, 1, 8, "bf16", 16),))
    assert gives(of_heads(latent, 2)) == [Box(0, range(3), range(1)), None]
