import asyncio
import contextlib
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import wire
from kvtransfer.errors import PeerLost, ProtocolError, TicketRefused
from kvtransfer.layout import Range
from kvtransfer.transfer import dialogue, source_dialogue
from kvtransfer.transfer.dialogue import Cursor
from kvtransfer.transfer.leases import Watermark
from tests.support.kvtransfer.rig import NUM_TOKENS, kind, running
from tests.support.waiting import until_async

NUM_LAYERS = 5
LAYERS = range(NUM_LAYERS)
NO_END = 1 << 40
CHUNK = st.tuples(st.integers(1, 4), st.lists(st.integers(0, NUM_LAYERS - 1), max_size=3))  # spans, layer marks


@given(
    chunks=st.lists(CHUNK, min_size=1, max_size=5),
    tail=st.integers(0, 63),
    begin_span=st.integers(0, 3),
    max_bytes=st.sampled_from((1, 64 * 10, 64 * 25, 10**6)),
    max_stretch=st.sampled_from((64, 128, NO_END)),
)
def test_any_watermark_is_covered_exactly_once(chunks, tail, begin_span, max_bytes, max_stretch):
    num_tokens = 64 * sum(spans for spans, _ in chunks) + tail
    begin = min(64 * begin_span, num_tokens)
    sent, taken = (Cursor(begin, num_tokens, LAYERS) for _ in range(2))
    seen = set()
    marks, full = [], 0
    for index, (spans, layers) in enumerate(chunks):
        upto = full + 64 * spans + (tail if index == len(chunks) - 1 else 0)
        marks += [Watermark(full, upto, layer) for layer in sorted(layers)] + [Watermark(upto, upto, NUM_LAYERS)]
        full = upto
    before, dialogue.MAX_RANGE_BYTES = dialogue.MAX_RANGE_BYTES, max_bytes
    try:
        for mark in marks:
            while not sent.done and (moved := sent.upcoming(mark, 5, 10**7, max_stretch)):
                sent.take(moved), taken.take(moved)
                cells = {(t, layer) for t in range(*moved[:2]) for layer in range(*moved[2:])}
                assert cells and not cells & seen
                assert all(
                    t < mark.full_token or (t < mark.upto_token and layer < mark.upto_layer) for t, layer in cells
                )
                seen |= cells
    finally:
        dialogue.MAX_RANGE_BYTES = before
    assert taken.done and len(seen) == (num_tokens - begin) * NUM_LAYERS


@pytest.mark.parametrize(
    "bad", (Range(0, 64, 0, 5), Range(128, 192, 0, 5), Range(64, 64, 0, 5), Range(64, 100, 0, 5), Range(64, 999, 0, 5),
            Range(64, 128, 1, 5), Range(64, 128, 0, 6), Range(64, 128, 0, 0)),
)  # fmt: skip
def test_ranges_follow_each_other(bad):
    cursor = Cursor(0, 200, LAYERS)
    cursor.take(Range(0, 64, 0, 5))
    with pytest.raises(ProtocolError):
        cursor.take(bad)


def test_layers_of_a_stretch_follow_each_other():
    cursor = Cursor(64, 200, LAYERS)
    cursor.take(Range(64, 192, 0, 2))
    for bad in (Range(64, 192, 0, 2), Range(64, 128, 2, 5), Range(64, 192, 3, 5), Range(192, 200, 0, 5)):
        with pytest.raises(ProtocolError):
            cursor.take(bad)
    cursor.take(Range(64, 192, 2, 5))
    cursor.take(Range(192, 200, 0, 5))
    assert cursor.done


@pytest.mark.parametrize("begin", (-64, 63, 264, 201))
def test_begins_where_a_span_does(begin):
    with pytest.raises(ProtocolError):
        Cursor(begin, 200, LAYERS)


def test_ranges_of_small_tokens_fit_a_frame():
    moved = Cursor(0, 1 << 20, LAYERS).upcoming(Watermark(1 << 20, 1 << 20, NUM_LAYERS), 5, 10**7, NO_END)
    assert moved == Range(0, dialogue.MAX_RANGE_TOKENS, 0, NUM_LAYERS)


def test_some_layers_of_a_model():
    """A rank that holds layers 4 to 8: what is written below or above them does not concern it."""
    cursor = Cursor(0, 200, range(4, 8))
    assert cursor.upcoming(Watermark(0, 128, 4), 1, 10**7, NO_END) is None
    assert cursor.upcoming(Watermark(0, 128, 6), 1, 10**7, NO_END) == Range(0, 128, 4, 6)
    cursor.take(Range(0, 128, 4, 6))
    assert cursor.upcoming(Watermark(0, 128, 6), 1, 10**7, NO_END) is None
    assert cursor.upcoming(Watermark(0, 128, 12), 1, 10**7, NO_END) == Range(0, 128, 6, 8)
    cursor.take(Range(0, 128, 6, 8))
    assert cursor.upcoming(Watermark(128, 200, 9), 1, 10**7, NO_END) == Range(128, 200, 4, 8), (
        "complete here before it is elsewhere"
    )


def test_a_long_stretch_waits_for_its_last_layer():
    cursor = Cursor(0, 400, LAYERS)
    assert cursor.upcoming(Watermark(0, 192, 2), 5, 10**7, 128) is None
    assert cursor.upcoming(Watermark(192, 192, 5), 5, 10**7, 128) == Range(0, 192, 0, NUM_LAYERS)
    assert cursor.upcoming(Watermark(0, 128, 2), 5, 10**7, 128) == Range(0, 128, 0, 2)
    cursor.take(Range(0, 128, 0, 2))
    assert cursor.upcoming(Watermark(0, 128, 3), 5, 10**7, 128) == Range(0, 128, 2, 3)


def test_digests_of_a_layer_that_fit_no_frame_wait_for_all_layers(monkeypatch):
    """As those of a chunk of 16384 tokens with 64 KV heads would; here a frame is short."""
    for module in (source_dialogue, wire):
        monkeypatch.setattr(module, "MAX_FRAME_BYTES", 720)

    async def main():
        async with running("tcp", digest="sha256") as rig:
            destination = rig.destination()
            fetching = asyncio.create_task(rig.fetch(rig.offer(), destination))
            for layer in (1, 2):
                rig.source.advance("k", NUM_TOKENS, layer)
                await asyncio.sleep(0.05)
            rig.source.finish("k")
            await fetching
            assert rig.arrived() and destination.upto[-1] == NUM_TOKENS

    asyncio.run(main())


def test_a_source_waits_for_its_taker(small_ranges):
    """Ten ranges are ready, and no more than four go out before the first of them is acknowledged."""

    async def main():
        async with running("inproc") as rig:
            num_unacked, most = 0, 0

            def count(frame, connection):
                nonlocal num_unacked, most
                num_unacked += {"ready": 1, "confirm": -1}.get(kind(frame), 0)
                most = max(most, num_unacked)
                return [frame]

            rig.source.fault = count
            destination, goes_on = rig.destination(640), asyncio.Event()
            destination.caught_up = goes_on.wait
            fetching = asyncio.create_task(rig.fetch(rig.ready_offer(num_tokens=640), destination))
            await until_async(lambda: most == source_dialogue.MAX_UNACKED, "as many are under way as may be")
            await asyncio.sleep(0.05)  # for one more, were it sent
            assert most == source_dialogue.MAX_UNACKED and not destination.upto
            goes_on.set()
            await fetching
            assert rig.arrived(end=640)

    asyncio.run(main())


def test_a_ticket_that_is_withdrawn_ends_the_dialogue_of_its_taker():
    async def main():
        async with running("inproc") as rig:
            offer, destination = rig.offer(), rig.destination()
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            rig.source.advance("k", 64)
            await until_async(lambda: destination.upto == [64], "the first range is there")
            rig.source.withdraw(offer.ticket)
            rig.source.finish("k")
            with pytest.raises(TicketRefused, match="withdrawn"):
                await fetching
            assert destination.upto == [64]
            rig.source.cancel("k")

    asyncio.run(main())


class Buffer:
    """What is on its way as a part fails."""


@pytest.mark.parametrize(
    "run", [dialogue.converse, lambda *parts: dialogue.together(parts)], ids=["one side", "shares"]
)
async def test_what_was_on_its_way_as_it_failed_does_not_wait_for_the_collector(run):
    held = []

    async def fails(in_s: float) -> None:
        buffer = Buffer()
        held.append(weakref.ref(buffer))
        await asyncio.sleep(in_s)
        raise PeerLost("the connection broke")

    gc.disable()
    try:
        with contextlib.suppress(PeerLost):
            await run(fails(10), fails(0))
        assert len(held) == 2 and not any(buffer() for buffer in held)
    finally:
        gc.enable()
