"""After any fault of a connection every fetch ends, with a name; no wrong KV is ever verified; all leases end; the next
request succeeds. For equal and unequal workers."""

import asyncio
import random

import numpy as np
import pytest

from kvtransfer import errors
from kvtransfer.layout import BlockRef, PromptKV
from kvtransfer.transfer import dialogue, pull
from kvtransfer.transfer.source import Source
from tests.support.kvtransfer.accidents import FAULTS, POINTS, AccidentConnection, Accidents
from tests.support.kvtransfer.ranks_and_forms import Cluster, by_heads, layout
from tests.support.kvtransfer.rig import Destination, kind
from tests.support.pace import patience
from tests.support.waiting import until_async

TRANSPORTS = ("inproc", "shm", "tcp")
NUM_TOKENS = 300
PAIRS = {
    "alike": (layout(16, "bf16"), by_heads(1), layout(16, "bf16"), by_heads(1)),
    "blocks": (layout(16, "bf16"), by_heads(1), layout(64, "bf16"), by_heads(1)),
    "mixed": (layout(16, "bf16"), by_heads(2), layout(64, "int8"), by_heads(1)),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Silence is noticed soon, and one span makes a range."""
    monkeypatch.setattr("kvtransfer.transfer.fetcher._PAUSES_S", (0.001, 0.001))
    monkeypatch.setattr(dialogue, "MAX_RANGE_BYTES", 1)
    monkeypatch.setattr(pull, "RENEW_S", 0.05)
    for module in ("socket_connection", "inproc"):
        monkeypatch.setattr(f"kvtransfer.transports.{module}.SILENCE_S", 0.3)


class Faulty:
    """A cluster whose connections meet `accidents`, on the source's side or the taker's."""

    def __init__(self, cluster: Cluster, monkeypatch):
        self.cluster, self.accidents = cluster, None
        serve = Source.serve

        async def served(source, connection, transport):
            await serve(
                source,
                AccidentConnection(connection, self.accidents) if self.accidents and self.at_source else connection,
                transport,
            )

        monkeypatch.setattr(Source, "serve", served)
        for fetcher in cluster.fetchers:
            opened = fetcher._dialer.open

            async def reached(endpoint, shape, opened=opened):
                connection = await opened(endpoint, shape)
                return (
                    AccidentConnection(connection, self.accidents)
                    if self.accidents and not self.at_source
                    else connection
                )

            fetcher._dialer.open = reached

    @property
    def at_source(self) -> bool:
        return self.accidents.point in ("ready", "confirm")

    async def fetch(self, key, accidents: Accidents | None, within_s: float = 1.0) -> tuple[str, list[Destination]]:
        """Run one request, and return its end and the verified destinations."""
        cluster, self.accidents = self.cluster, accidents
        for rank in cluster.takers:
            rank.memory.blocks[:] = 0
        handle, ticket = cluster.offer(key, NUM_TOKENS)
        cluster.finish(key)
        destinations = cluster.destinations(NUM_TOKENS)
        try:
            await cluster.fetch(handle, ticket, destinations, within_s)
            outcome = "ok"
        except errors.KVError as exc:
            outcome = exc.status
        self.accidents = None
        for destination in destinations:
            assert destination.upto == sorted(set(destination.upto)), "nothing is verified twice"
        cluster.check_arrived(range(0, min((d.upto[-1] if d.upto else 0) for d in destinations), 37))
        for source in cluster.sources:
            source.cancel(key)
        return outcome, destinations


EXPECTED = {  # None: at every point that has no row of its own
    ("drop", "ready"): {"deadline_exceeded", "protocol_error"},
    ("drop", "ack"): {"deadline_exceeded", "protocol_error"},
    ("drop", "confirm"): {"deadline_exceeded", "protocol_error"},
    ("drop", "want"): {"protocol_error"},
    ("delay", None): {"ok"},
    ("corrupt", "want"): {"ticket_refused"},
    ("corrupt", "ready"): {"digest_mismatch"},
    ("corrupt", "ack"): {"protocol_error"},
    ("corrupt", "confirm"): {"protocol_error"},
    ("kill", None): {"ok"},
    ("truncate", None): {"ok", "peer_lost"},
    ("twice", "want"): {"protocol_error"},
    ("twice", "ready"): {"protocol_error"},
    ("twice", "ack"): {"protocol_error"},
    ("twice", "confirm"): {"protocol_error", "ok"},
    ("reorder", "want"): {"protocol_error"},
    ("reorder", None): {"protocol_error", "ok"},  # well where a frame of another kind is what overtakes it
    **{(fault, "end"): {"ok"} for fault in FAULTS},  # everything was verified by then
}


ACCIDENTS = [
    (transport, fault, point)
    for transport in TRANSPORTS
    for fault in FAULTS
    for point in POINTS
    if point != "end" or transport == "tcp"  # behind the last frame no transport differs: it was all verified
]


def allowed(fault: str, point: str) -> set[str]:
    return EXPECTED.get((fault, point)) or EXPECTED[fault, None]


@pytest.mark.parametrize("transport, fault, point", ACCIDENTS)
@pytest.mark.parametrize("likeness", ("alike", pytest.param("mixed", marks=pytest.mark.long)))
def test_one_accident(transport, likeness, fault, point, monkeypatch):
    pair = PAIRS[likeness]

    async def main():
        async with Cluster(transport, *pair, ttl_s=20.0) as cluster:
            faulty = Faulty(cluster, monkeypatch)
            accidents = Accidents(fault, point, nth=0 if point in ("want", "end") else 2)
            outcome, destinations = await faulty.fetch("hit", accidents, within_s=0.6)
            assert accidents.done == [fault]
            assert outcome in allowed(fault, point), outcome
            assert (outcome == "ok") == all(each.upto[-1:] == [NUM_TOKENS] for each in destinations)
            outcome, destinations = await faulty.fetch("next", None, within_s=10)
            assert outcome == "ok" and destinations[0].upto[-1] == NUM_TOKENS
            for source in cluster.sources:
                assert source.num_leases == 0
            assert sorted(key for _, key, _ in cluster.endings) == sorted(["hit", "next"] * len(cluster.sources))

    asyncio.run(main())


class Behind:
    """A connection that breaks behind the first frame of kind `point`, which has come or gone by then."""

    def __init__(self, connection, point: str):
        self._connection, self._point, self._is_broken = connection, point, False

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def _see(self, frame) -> None:
        self._is_broken |= kind(frame) == self._point

    async def send(self, frame, payload=()):
        await self._connection.send(frame, payload)
        self._see(frame)
        if kind(frame) == self._point:
            self._break()

    async def receive(self):
        if self._is_broken:
            self._break()
        frame = await self._connection.receive()
        self._see(frame)
        return frame

    def _break(self) -> None:
        self._connection.close()
        raise errors.PeerLost("the line breaks")


def breaking(cluster: Cluster, point: str, most: int) -> list:
    """Let the first `most` connections of the cluster's one taker break behind `point`; return all that were opened."""
    (fetcher,) = cluster.fetchers
    opened, connections = fetcher._dialer.open, []

    async def reached(endpoint, shape):
        connection = await opened(endpoint, shape)
        connections.append(Behind(connection, point) if len(connections) < most else connection)
        return connections[-1]

    fetcher._dialer.open = reached
    return connections


async def fetch_whole(cluster: Cluster):
    """Fetch a prompt that is there; return its destination, and the report."""
    handle, ticket = cluster.offer("k", NUM_TOKENS)
    cluster.finish("k")
    (destination,) = cluster.destinations(NUM_TOKENS)
    (report,) = await cluster.fetch(handle, ticket, [destination])
    return destination, report


def test_a_line_that_breaks_behind_each_range_is_taken_up_as_often(transport):
    """More often than a taker comes back in vain: what was verified in between counts."""

    async def main():
        async with Cluster(transport, *PAIRS["alike"], ttl_s=20.0) as cluster:
            connections = breaking(cluster, "confirm", most=5)
            destination, _ = await fetch_whole(cluster)
            assert destination.upto == [64, 128, 192, 256, 300] and len(connections) == 5
            cluster.check_arrived(range(0, NUM_TOKENS, 37))

    asyncio.run(main())


def test_a_taker_whose_goodbye_was_lost_has_what_it_came_for(transport):
    """It comes back to say it again, to a lease that may have ended."""

    async def main():
        async with Cluster(transport, *PAIRS["alike"], ttl_s=20.0) as cluster:
            connections = breaking(cluster, "end", most=1)
            destination, report = await fetch_whole(cluster)
            assert (report.num_tokens, report.transport) == (NUM_TOKENS, transport) and len(connections) > 1
            assert destination.upto[-1] == NUM_TOKENS
            await until_async(lambda: cluster.endings == [(0, "k", "released")], "the source has heard it")

    asyncio.run(main())


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
def test_every_sixteenth_operation_fails(transport, pair, seed, monkeypatch):
    """D11: accident after accident; leases and verified KV stay right, and a healthy request behind them succeeds."""

    async def main():
        rng = random.Random(seed)
        async with Cluster(transport, *pair, ttl_s=20.0) as cluster:
            faulty, num_accidents = Faulty(cluster, monkeypatch), 0
            for number in range(6):
                fault = rng.choice(("corrupt", "kill", "twice", "truncate"))
                accidents = Accidents(fault, rng.choice(POINTS), rng.randrange(4), every=rng.choice((0, 3)), seed=seed)
                outcome, destinations = await faulty.fetch(number, accidents)
                ends = (
                    allowed(fault, accidents.point) | {"peer_lost"} if accidents.done else {"ok"}
                )  # lost where it was hit too often
                assert outcome in ends, (outcome, accidents)
                assert (outcome == "ok") == all(each.upto[-1:] == [NUM_TOKENS] for each in destinations)
                num_accidents += len(accidents.done)
            assert num_accidents
            assert (await faulty.fetch("next", None, within_s=10))[0] == "ok"
            assert len(cluster.endings) == 7 * len(cluster.sources)

    asyncio.run(main())


@pytest.mark.parametrize("where", ("first", "middle", "last"))
def test_one_bit_of_any_layer(transport, pair, where):
    """D1: flipped in the source's pool between its digest and the reading, in each layer."""

    async def main():
        async with Cluster(transport, *pair) as cluster:
            token = {"first": 0, "middle": 150, "last": NUM_TOKENS - 1}[where]
            rank = cluster.ranks[-1]
            (box,) = rank.shard
            for layer in box.layers:
                flipped = []

                def flip(frame):
                    moved = frame.ready.range
                    if not flipped and frame.HasField("ready") and moved.token_begin <= token < moved.token_end:
                        rank.row(0, cluster.source_ids, token, layer, 1, box.heads.start)[3] ^= 4
                        flipped.append(layer)

                restore = watch_sending(cluster.sources[-1], flip)
                handle, ticket = cluster.offer(layer, NUM_TOKENS)
                cluster.finish(layer)
                destinations = cluster.destinations(NUM_TOKENS)
                if transport == "tcp" and rank.layout.groups[0].form != cluster.taker_layout.groups[0].form:
                    await cluster.fetch(handle, ticket, destinations)  # encoded before Ready: the old bytes travel
                else:
                    with pytest.raises(errors.DigestMismatch):
                        await cluster.fetch(handle, ticket, destinations)
                    assert all(not each.upto or each.upto[-1] <= token for each in destinations)
                assert flipped
                rank.row(0, cluster.source_ids, token, layer, 1, box.heads.start)[3] ^= 4
                restore()
                for source in cluster.sources:
                    source.cancel(layer)

    asyncio.run(main())


def watch_sending(source, on_frame):
    """`on_frame(frame)` sees what this source is about to send; returns what ends it."""
    serve = source.serve

    class Watched:
        def __init__(self, connection):
            self._connection = connection

        def __getattr__(self, name):
            return getattr(self._connection, name)

        async def send(self, frame, payload=()):
            on_frame(frame)
            await self._connection.send(frame, payload)

    source.serve = lambda connection, transport: serve(Watched(connection), transport)

    def restore():
        source.serve = serve

    return restore


def test_a_whole_transfer_replayed(transport, pair):
    """D5: the ticket of a fetch that is over opens nothing, while the lease lives and after it."""

    async def main():
        async with Cluster(transport, *pair) as cluster:
            handle, ticket = cluster.offer("k", NUM_TOKENS)
            cluster.advance("k", NUM_TOKENS)
            await cluster.fetch(handle, ticket, cluster.destinations(NUM_TOKENS))
            with pytest.raises(errors.TicketRefused):
                await cluster.fetch(handle, ticket, cluster.destinations(NUM_TOKENS))
            cluster.finish("k")
            with pytest.raises(errors.LeaseExpired):
                await cluster.fetch(handle, ticket, cluster.destinations(NUM_TOKENS))
            assert sum(source.counters["ticket_refused"] for source in cluster.sources) >= 1

    asyncio.run(main())


def test_read_after_release(transport, pair):
    """D7: the source's blocks go to another request while the taker still reads them: never verified."""

    async def main():
        async with Cluster(transport, *pair) as cluster:

            def reassign(frame):
                if frame.HasField("ready") and frame.ready.range.token_begin == 64:
                    for block in cluster.source_ids[:8]:
                        cluster.generation[int(block)] += 1
                    for rank in cluster.ranks:
                        rank.memory.blocks[cluster.source_ids[:8]] = 0

            restore = watch_sending(cluster.sources[0], reassign)
            handle, ticket = cluster.offer("k", NUM_TOKENS)
            cluster.finish("k")
            destinations = cluster.destinations(NUM_TOKENS)
            with pytest.raises(errors.KVError) as caught:
                await cluster.fetch(handle, ticket, destinations)
            assert caught.value.status in ("stale_blocks", "digest_mismatch")
            assert all(not each.upto or each.upto[-1] <= 64 for each in destinations)
            restore()

    asyncio.run(main())


def test_the_taker_is_full(transport, pair):
    """D9: no room is an end with that name, not with the deadline's: nothing waits for a count."""

    class Full(Destination):
        def set_aside(self, upto_token):
            raise errors.TransferFailed("no room")

    async def main():
        async with Cluster(transport, *pair) as cluster:
            handle, ticket = cluster.offer("k", NUM_TOKENS)
            cluster.finish("k")
            with pytest.raises(errors.TransferFailed, match="no room"):
                await cluster.fetch(handle, ticket, [Full([]) for _ in cluster.takers])

    asyncio.run(main())


@pytest.mark.parametrize("num_fetches", (80, pytest.param(240, marks=pytest.mark.long)))
def test_many_healthy_ones_have_no_false_alarm(transport, pair, num_fetches, monkeypatch):
    """D14: all at once, some with a prefix already there, moved in chunks."""
    for module in ("socket_connection", "inproc"):
        monkeypatch.setattr(f"kvtransfer.transports.{module}.SILENCE_S", patience(60))
    monkeypatch.setattr(dialogue, "MAX_RANGE_BYTES", 8 << 20)

    async def main():
        async with Cluster(transport, *pair, ttl_s=patience(30)) as cluster:
            rng, tasks = np.random.default_rng(1), []
            keys = range(num_fetches)
            for key in keys:
                num_tokens = int(rng.integers(65, NUM_TOKENS))
                handle, ticket = cluster.offer(key, num_tokens)
                destinations = cluster.destinations(num_tokens)
                for each in destinations:
                    each.num_cached_tokens = 64 * int(rng.integers(0, 2))
                tasks.append(cluster.fetch(handle, ticket, destinations, patience(120)))
            fetching = asyncio.gather(*tasks)
            await asyncio.sleep(0)
            for key in keys:
                cluster.advance(key, 64)
                await asyncio.sleep(0)
            for key in keys:
                cluster.finish(key)
            await fetching
            assert not any(source.counters["digest_mismatch"] for source in cluster.sources)
            assert not any(source.counters["taker_digest_mismatch"] for source in cluster.sources)

    asyncio.run(main())


# ---- bad input: refused before anything is set aside, counted, and the next one is served ----


def bad_wants():
    def spoil(**fields):
        def change(want):
            for name, value in fields.items():
                setattr(want, name, value)

        return change

    def box(**fields):
        def change(want):
            for name, value in fields.items():
                setattr(want.part, name, value)

        return change

    def group(**fields):
        def change(want):
            for name, value in fields.items():
                setattr(want.layout.groups[0], name, value)

        return change

    return {
        "unknown digest": (spoil(digest="md5"), "protocol_error"),
        "no digest": (spoil(digest=""), "protocol_error"),
        "foreign layers": (box(layer_end=99), "protocol_error"),
        "no heads": (box(head_end=0), "protocol_error"),
        "another group": (box(group=3), "protocol_error"),
        "no shares": (spoil(num_shares=0), "protocol_error"),
        "share beyond": (spoil(share=7), "protocol_error"),
        "too many shares": (spoil(num_shares=1 << 20), "protocol_error"),
        "not on a span": (spoil(token_begin=5), "protocol_error"),
        "beyond the prompt": (spoil(token_begin=6400), "protocol_error"),
        "another transport": (spoil(transport="carrier pigeon"), "protocol_error"),
        "wrong layout": (group(head_dim=32), "layout_mismatch"),
        "finer form": (group(form="fp32"), "layout_mismatch"),
        "unknown form": (group(form="fp12"), "layout_mismatch"),
        "no layers": (group(num_layers=0), "layout_mismatch"),
        "whole blocks of other size": (lambda want: (group(block_size=32)(want), spoil(in_blocks=True)(want)), "protocol_error"),
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_wants())
def test_a_bad_want(transport, name, monkeypatch):
    spoil, status = bad_wants()[name]

    async def main():
        async with Cluster(transport, *PAIRS["alike"]) as cluster:
            handle, ticket = cluster.offer("k", NUM_TOKENS)
            cluster.finish("k")
            fetcher, opened = cluster.fetchers[0], cluster.fetchers[0]._dialer.open

            async def reached(endpoint, shape):
                connection = await opened(endpoint, shape)
                send = connection.send

                async def sending(frame, payload=()):
                    if frame.HasField("want"):
                        spoil(frame.want)
                    await send(frame, payload)

                connection.send = sending
                return connection

            monkeypatch.setattr(fetcher._dialer, "open", reached)
            destinations = cluster.destinations(NUM_TOKENS)
            with pytest.raises(errors.KVError) as caught:
                await cluster.fetch(handle, ticket, destinations)
            assert caught.value.status == status, caught.value
            assert destinations[0].asked == [] and cluster.sources[0].counters[status] == 1
            assert fetcher.counters[status] == 1 and cluster.sources[0].counters["bytes_confirmed"] == 0
            monkeypatch.setattr(fetcher._dialer, "open", opened)
            await cluster.fetch(handle, ticket, destinations)
            assert fetcher.counters["fetches_done"] == 1
            cluster.check_arrived((0, NUM_TOKENS - 1))

    asyncio.run(main())


@pytest.mark.parametrize("bad", ([BlockRef(-1, 5)], [BlockRef(1 << 30, 5)], []))
def test_an_offer_of_blocks_that_are_not_there(bad):
    async def main():
        async with Cluster("tcp", *PAIRS["alike"]) as cluster:
            source = cluster.sources[0]
            with pytest.raises((errors.ProtocolError, ValueError)):
                source.offer("k", PromptKV(10, tuple(bad), (), bytes(32)), cluster.fetchers[0].taker())
            assert source.num_leases == 0

    asyncio.run(main())
