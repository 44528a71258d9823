"""Writes of a session: merged, split, bounded, in an order that each key can rely on."""

import asyncio

import pytest

from baton.engine.core.request import FinishReason, Key, TokenLogprobs, TokenRun
from baton.v1 import worker_pb2 as pb
from baton.worker.wire.outbox import MAX_MESSAGE_BYTES, IndexFeed, Outbox, Row, step_outputs
from tests.support.worker.scripted import rows_of

A, B = Key("a"), Key("b")


class Transport:
    """Takes events when the test lets it."""

    def __init__(self):
        self.events: list[pb.Event] = []
        self.open = asyncio.Event()
        self.open.set()

    async def write(self, event):
        await self.open.wait()
        self.events.append(event)

    def kinds(self):
        return [event.WhichOneof("kind") for event in self.events]


async def settle(outbox):
    async with asyncio.timeout(10):
        while not outbox.is_empty:
            await asyncio.sleep(0.001)


def drive(script, **options):
    """Runs `script(outbox, transport)` beside the writer."""

    async def main():
        transport = Transport()
        outbox = Outbox(transport.write, **options)
        writer = asyncio.create_task(outbox.run())
        await script(outbox, transport)
        outbox.close()
        await asyncio.wait_for(writer, 10)
        return transport

    return asyncio.run(main())


def token(key, index, choice=0, reason=None):
    return TokenRun(key, choice, index, (100 + index,), (), reason)


def test_what_was_not_written_yet_is_merged():
    async def script(outbox, transport):
        transport.open.clear()
        outbox.reply(pb.Event(granted=pb.Granted()))
        await asyncio.sleep(0.01)
        for index in range(1, 30):
            outbox.add_run(token(A, index))
            outbox.add_run(token(B, index, choice=1, reason=FinishReason.STOP if index == 29 else None))
        for step in range(5):
            outbox.set_load(pb.Load(step=step))
        transport.open.set()
        await settle(outbox)

    transport = drive(script)
    assert transport.kinds() == ["granted", "step_output", "load"]
    (name, row), (other, last) = rows_of(transport.events[1].step_output)
    assert (name, row.first_index, row.token_ids) == ("a", 1, list(range(101, 130)))
    assert (other, last.choice, last.finish_reason, row.finish_reason) == ("b", 1, 1, 0)
    assert transport.events[2].load.step == 4


def test_an_ending_comes_after_its_rows_and_a_reply_before_them():
    async def script(outbox, transport):
        transport.open.clear()
        outbox.reply(pb.Event(granted=pb.Granted()))
        await asyncio.sleep(0.01)
        outbox.add_run(token(A, 1))
        outbox.end(pb.Event(ended=pb.Ended()))
        outbox.reply(pb.Event(fetched=pb.Fetched()))
        transport.open.set()
        await settle(outbox)

    assert drive(script).kinds() == ["granted", "fetched", "step_output", "ended"]


def test_a_reply_that_comes_while_replies_are_written_still_goes_before_rows():
    async def script(outbox, transport):
        transport.open.clear()
        outbox.reply(pb.Event(granted=pb.Granted()))
        await asyncio.sleep(0.01)  # the writer waits in the first write
        outbox.reply(pb.Event(done=pb.Done()))
        outbox.add_run(token(A, 1))
        transport.open.set()
        await settle(outbox)

    assert drive(script).kinds() == ["granted", "done", "step_output"]


def test_a_sequence_that_nobody_reads_is_named():
    async def script(outbox, transport):
        transport.open.clear()
        outbox.reply(pb.Event(granted=pb.Granted()))
        await asyncio.sleep(0.01)
        assert all(outbox.add_run(token(A, index)) for index in range(1, 9))
        assert outbox.add_run(token(B, 1)), "another sequence has its own bound"
        assert not outbox.add_run(token(A, 9))
        transport.open.set()

    drive(script, max_unread_tokens=8)


def test_only_what_was_taken_counts_as_read(monkeypatch):
    """Rounds of replies alone take no rows: a key that is parked over its rows stays so until those are written."""
    # Between two rounds of rows that no ending hurries.
    monkeypatch.setattr("baton.worker.wire.outbox.MIN_GAP_S", 3600.0)

    async def script(outbox, transport):
        outbox.add_run(token(B, 1))
        await settle(outbox)
        assert not all(outbox.add_run(token(A, index)) for index in range(1, 10))
        for _ in range(3):
            outbox.reply(pb.Event(granted=pb.Granted()))
            while not transport.events or transport.kinds()[-1] != "granted":
                await asyncio.sleep(0.001)
            transport.events.append(pb.Event(load=pb.Load()))  # so that the next granted is seen
        await asyncio.sleep(0.01)
        assert read == []
        outbox.end(pb.Event(ended=pb.Ended()))
        await settle(outbox)
        assert read == [A]
        assert not all(outbox.add_run(token(A, index)) for index in range(10, 19))
        outbox.forget(A)  # its tokens go elsewhere
        outbox.end(pb.Event(ended=pb.Ended()))
        await settle(outbox)
        assert read == [A]

    read: list = []
    drive(script, max_unread_tokens=8, on_read=read.append)


def test_what_is_too_much_again_is_not_read():
    """Tokens of the step that was under way come while the rows before them are written."""

    async def script(outbox, transport):
        boxes.append(outbox)
        transport.open.clear()
        assert not all(outbox.add_run(token(A, index)) for index in range(1, 10))
        while outbox.num_rows:
            await asyncio.sleep(0.001)  # the writer waits with these rows in its hands
        assert not all(outbox.add_run(token(A, index)) for index in range(10, 19))
        transport.open.set()
        await settle(outbox)

    boxes, left = [], []  # rows that were unwritten when a key was read
    drive(script, max_unread_tokens=8, on_read=lambda key: left.append(boxes[0].num_rows))
    assert left == [0]


def test_a_gateway_that_does_not_read_is_not_obeyed():
    async def script(outbox, transport):
        transport.open.clear()
        outbox.reply(pb.Event(granted=pb.Granted()))
        await asyncio.sleep(0.01)
        for _ in range(1100):
            outbox.reply(pb.Event(granted=pb.Granted()))
        room = asyncio.create_task(outbox.room())
        await asyncio.sleep(0.02)
        assert not room.done()
        transport.open.set()
        await asyncio.wait_for(room, 5)

    drive(script)


@pytest.mark.parametrize("num_top", [None, 20])
def test_messages_are_split(num_top):
    rows = {}
    for index in range(6):
        row = rows[Key(f"r{index}"), index % 2] = Row(1)
        row.token_ids = list(range(200_000, 200_000 + 30_000 // (1 if num_top is None else 20)))
        if num_top is not None:
            entry = TokenLogprobs((200_000, -1.5), tuple((200_000 + i, -2.5) for i in range(num_top)))
            row.logprobs = [entry] * len(row.token_ids)
        row.finish_reason = FinishReason.LENGTH
    events = list(step_outputs(rows))
    assert len(events) > 1 and all(event.ByteSize() <= MAX_MESSAGE_BYTES for event in events)
    pieces = {}
    for event in events:
        for name, piece in rows_of(event.step_output):
            whole, reasons = pieces.setdefault((name, piece.choice), ([], []))
            assert piece.first_index == 1 + len(whole) and not any(reasons)
            assert len(piece.logprobs) == (len(piece.token_ids) if num_top else 0)
            whole += piece.token_ids
            reasons.append(piece.finish_reason)
    sent = {(key.request_id, choice): row.token_ids for (key, choice), row in rows.items()}
    assert {key: piece[0] for key, piece in pieces.items()} == sent
    assert all(reasons[-1] == 2 for _, reasons in pieces.values())


def test_nothing_makes_no_message():
    assert list(step_outputs({})) == []


def test_what_an_answer_sealed_is_told_before_its_end():
    async def script(outbox, transport):
        holder.append(outbox)
        outbox.subscribe(epoch=1, snapshot=[])
        await settle(outbox)
        outbox.end(pb.Event(ended=pb.Ended()))
        await settle(outbox)

    holder: list = []
    transport = drive(script, before_endings=lambda: holder[0].add_block_events([b"span"], []))
    assert transport.kinds()[-2:] == ["block_events", "ended"]
    assert list(transport.events[-2].block_events.sealed) == [b"span"]


def test_index_events_are_numbered_merged_and_split():
    feed = IndexFeed(7, [bytes([i]) * 32 for i in range(3)])
    feed.add([b"x" * 32], [bytes([0]) * 32])
    (snapshot,) = (event.block_events for event in feed.take())
    assert (snapshot.epoch, snapshot.seq, snapshot.snapshot) == (7, 0, True)
    assert set(snapshot.sealed) == {bytes([1]) * 32, bytes([2]) * 32, b"x" * 32} and not snapshot.evicted
    assert list(feed.take()) == []

    feed.add([b"y" * 32], [b"x" * 32])
    feed.add([b"x" * 32, b"z" * 32], [b"y" * 32])
    feed.add([], [b"x" * 32])
    (event,) = (event.block_events for event in feed.take())
    assert (event.seq, event.snapshot, list(event.sealed)) == (1, False, [b"z" * 32])
    assert list(event.evicted) == [b"x" * 32], "the gateway knew of x, and not of y"

    feed.add([i.to_bytes(32, "big") for i in range(9000)], [])
    events = [event.block_events for event in feed.take()]
    assert [event.seq for event in events] == [2, 3] and sum(len(event.sealed) for event in events) == 9000


def test_an_empty_snapshot_is_still_said():
    (event,) = IndexFeed(1, []).take()
    assert event.block_events.snapshot
