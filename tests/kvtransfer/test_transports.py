"""One suite for every transport: what any of them must do, and what must never get through any of them."""

import asyncio
import random
import time
from pathlib import Path

import pytest
from tests.kvtransfer.rig import NUM_TOKENS, NUMERICS, Destination, assert_still_serves, layout, running

from baton.v1 import kv_pb2
from kvtransfer import dialogue, errors, pull, transport, wire
from kvtransfer.fetcher import Fetcher
from kvtransfer.source import Source
from kvtransfer.transport import local_host_id

TRANSPORTS = ("inproc", "shm", "tcp")


@pytest.fixture(params=TRANSPORTS)
def name(request):
    return request.param


@pytest.fixture
def small_ranges(monkeypatch):
    """One span per Ready, so that a prompt has several."""
    monkeypatch.setattr(dialogue, "MAX_RANGE_BYTES", 1)


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setattr(transport, "INLINE_BYTES", 0)


def kind(frame) -> str:
    return frame.WhichOneof("kind")


async def until(condition, what: str) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)
    assert condition(), what


# ---- what arrives ----


@pytest.mark.parametrize("block_size", (1, 16, 64, 128))
@pytest.mark.parametrize("form", ("bf16", "int8"))
def test_all_blocks_arrive(name, block_size, form):
    async def main():
        num_tokens = 38 if block_size == 1 else NUM_TOKENS
        async with running(name, layout(block_size, form)) as rig:
            destination = rig.destination(num_tokens)
            report = await rig.fetch(rig.ready_offer(num_tokens=num_tokens), destination)
            assert rig.arrived(0, num_tokens) and destination.upto == [num_tokens]
            assert report.num_tokens == num_tokens and report.transport == name and name in report.reason
            assert report.num_bytes == rig.layout.block_bytes * num_tokens // block_size
            await rig.wait_released("k")

    asyncio.run(main())


def test_only_valid_bytes_of_the_tail_travel(name):
    async def main():
        async with running(name, layout(64)) as rig:
            rig.taker_pool[:] = 0xAA
            await rig.fetch(rig.ready_offer(), rig.destination())
            assert rig.arrived()
            last = rig.tokens(rig.taker_pool, rig.taker_ids, NUM_TOKENS, 320)
            assert (last == 0xAA).all(), "bytes behind the last token are nobody's business"

    asyncio.run(main())


def test_many_ranges_in_threads(name, small_ranges, in_threads):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            await rig.fetch(rig.ready_offer(), destination)
            assert rig.arrived() and destination.upto == [64, 128, 192, 256, 300]

    asyncio.run(main())


def test_ranges_follow_the_watermark(name):
    """By chunks of tokens and by layers; nothing is verified before all its layers are there."""

    async def main():
        async with running(name) as rig:
            offer, destination = rig.offer(num_ready_tokens=64), rig.destination()
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until(lambda: destination.upto == [64], "the cached prefix leaves at once")
            rig.source.advance("k", 192, 1)
            await asyncio.sleep(0.05)
            assert destination.upto == [64] and destination.asked[-1] == 192
            rig.source.advance("k", 192, 2)
            rig.source.advance("k", 192)
            await until(lambda: destination.upto == [64, 192], "all layers of the second chunk")
            rig.source.advance("k", 250)  # not a whole span: waits
            await until(lambda: destination.upto[-1] == 192, "spans only")
            rig.source.finish("k")
            report = await fetching
            assert destination.upto[-1] == NUM_TOKENS and rig.arrived()
            assert report.after_last_ready_s < report.transfer_s
            await rig.wait_released("k")

    asyncio.run(main())


def test_cached_prefix_does_not_move(name):
    async def main():
        async with running(name) as rig:
            rig.taker_pool[:] = 0
            destination = rig.destination(num_cached_tokens=128)
            report = await rig.fetch(rig.ready_offer(), destination)
            assert report.num_tokens == NUM_TOKENS - 128 and rig.arrived(128) and destination.upto == [NUM_TOKENS]
            assert not rig.tokens(rig.taker_pool, rig.taker_ids, 0, 128).any()

    asyncio.run(main())


def test_a_lease_waits_for_finish(name):
    async def main():
        async with running(name) as rig:
            offer = rig.offer(num_ready_tokens=NUM_TOKENS)
            await rig.fetch(offer, rig.destination())
            await asyncio.sleep(0.02)
            assert rig.released == []
            rig.source.finish("k")
            assert rig.released == ["k"]

    asyncio.run(main())


def test_many_at_once(name, small_ranges):
    async def main():
        async with running(name) as rig:
            offers = [rig.offer(key) for key in range(80)]
            destinations = [rig.destination() for _ in offers]
            fetching = [asyncio.create_task(rig.fetch(*pair)) for pair in zip(offers, destinations)]
            for upto in (64, 192, NUM_TOKENS):
                for key in range(80):
                    rig.source.advance(key, upto)
                await asyncio.sleep(0.01)
            for key in range(80):
                rig.source.finish(key)
            await asyncio.gather(*fetching)
            assert all(destination.upto[-1] == NUM_TOKENS for destination in destinations) and rig.arrived()
            assert not rig.source.counters["digest_mismatch"]

    asyncio.run(main())


# ---- a line that breaks ----


def test_resumes_after_the_line_broke(name, small_ranges):
    async def main():
        async with running(name) as rig:
            broken = []

            def fault(frame, line):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 128 and not broken:
                    broken.append(frame)
                    line.close()
                    return []
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            report = await rig.fetch(rig.ready_offer(), destination)
            assert broken and rig.arrived() and destination.upto[-1] == NUM_TOKENS
            assert destination.upto == sorted(set(destination.upto)), "nothing is verified twice"
            assert report.num_tokens == NUM_TOKENS
            await rig.wait_released("k")

    asyncio.run(main())


def test_source_dies(name, small_ranges):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            offer = rig.offer(num_ready_tokens=128)
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until(lambda: destination.upto == [64, 128], "the first spans")
            await rig.source.stop()
            with pytest.raises(errors.TransferFailed):
                await fetching
            assert destination.upto == [64, 128] and rig.released == ["k"]

    asyncio.run(main())


def test_silent_source_is_lost(name, monkeypatch):
    """A source that is stopped in mid-dialogue: every wait ends, and so does the fetch."""
    monkeypatch.setattr("kvtransfer.fetcher._PAUSES_S", ())
    monkeypatch.setattr(dialogue, "RENEW_S", 0.02)
    monkeypatch.setattr(pull, "RENEW_S", 0.02)
    for module in ("line", "inproc"):
        monkeypatch.setattr(f"kvtransfer.{module}.SILENCE_S", 0.2)

    async def main():
        async with running(name) as rig:
            rig.source.fault = lambda frame, line: [] if kind(frame) == "renew" else [frame]
            with pytest.raises(errors.PeerLost, match="silent"):
                await rig.fetch(rig.offer(), rig.destination())

    asyncio.run(main())


def test_taker_dies_and_the_lease_expires(name, monkeypatch):
    async def main():
        async with running(name, ttl_s=0.3) as rig:
            fetching = asyncio.create_task(rig.fetch(rig.offer(num_ready_tokens=64), rig.destination()))
            await asyncio.sleep(0.05)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            assert rig.released == []
            await rig.wait_released("k")
            assert rig.source.counters["leases_expired"] == 1

    asyncio.run(main())


def test_dialogue_renews_the_lease(name, monkeypatch):
    monkeypatch.setattr(pull, "RENEW_S", 0.05)

    async def main():
        async with running(name, ttl_s=0.3) as rig:
            destination = rig.destination()
            fetching = asyncio.create_task(rig.fetch(rig.offer(), destination))
            await asyncio.sleep(0.8)
            rig.source.finish("k")
            await fetching
            assert rig.arrived()

    asyncio.run(main())


def test_deadline(name):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            with pytest.raises(errors.DeadlineExceeded):
                await rig.fetch(rig.offer(), destination, within_s=0.1)
            with pytest.raises(errors.DeadlineExceeded):
                await rig.fetch(rig.offer("late"), destination, within_s=-1)
            assert destination.upto == []

    asyncio.run(main())


def test_source_cancels(name):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            fetching = asyncio.create_task(rig.fetch(rig.offer(num_ready_tokens=64), destination))
            await until(lambda: destination.upto == [64], "the first span")
            rig.source.cancel("k")
            with pytest.raises(errors.TransferCancelled):
                await fetching
            assert rig.released == ["k"]
            await assert_still_serves(rig)

    asyncio.run(main())


@pytest.mark.parametrize("pause_s", (0.0, 0.001, 0.003, 0.01))
def test_no_byte_lands_after_cancel(name, pause_s, small_ranges, in_threads):
    async def main():
        async with running(name) as rig:
            offer = rig.offer(num_ready_tokens=64)
            fetching = asyncio.create_task(rig.fetch(offer, rig.destination()))
            await asyncio.sleep(pause_s)
            rig.source.finish("k")
            await asyncio.sleep(pause_s)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            rig.taker_pool[:] = 0x55
            await asyncio.sleep(0.05)
            rig.source.cancel("k")
            assert (rig.taker_pool == 0x55).all()
            await assert_still_serves(rig)

    asyncio.run(main())


def test_cancel_waits_for_the_copy(monkeypatch):
    """A thread in mid-copy cannot be stopped, so `fetch` must not return before it has ended."""
    monkeypatch.setattr(transport, "INLINE_BYTES", 0)
    ended = []
    place = pull.Pull._place_and_check

    def slow(self, *args):
        time.sleep(0.2)
        place(self, *args)
        ended.append(True)

    monkeypatch.setattr(pull.Pull, "_place_and_check", slow)

    async def main():
        async with running("shm") as rig:
            fetching = asyncio.create_task(rig.fetch(rig.ready_offer(), rig.destination()))
            await asyncio.sleep(0.1)
            fetching.cancel()
            await asyncio.sleep(0.01)
            fetching.cancel()  # once more, while it waits
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert ended

    asyncio.run(main())


# ---- tickets, leases, generations ----


def test_forged_ticket(name):
    async def main():
        async with running(name) as rig:
            offer, destination = rig.ready_offer(), rig.destination()
            ticket = kv_pb2.Ticket.FromString(offer.ticket)
            ticket.mac = bytes(32)
            forged = offer._replace(ticket=ticket.SerializeToString())
            with pytest.raises(errors.TicketRefused):
                await rig.fetch(forged, destination)
            assert rig.source.counters["ticket_refused"] == 1 and destination.asked == destination.upto == []
            await rig.fetch(offer, destination)  # the true one still opens

    asyncio.run(main())


def test_another_takers_ticket(name):
    async def main():
        async with running(name) as rig:
            offer = rig.ready_offer()
            thief = rig.make_fetcher(b"decode-1", 23)
            deadline = time.monotonic() + 10
            with pytest.raises(errors.TicketRefused):  # its own side refuses
                await thief.fetch(offer.handle, offer.ticket, rig.destination(), deadline)
            thief._want = lambda ticket: kv_pb2.Want(
                ticket=kv_pb2.Ticket.FromString(ticket), taker_instance=b"decode-1", taker_epoch=23
            )
            with pytest.raises(errors.TicketRefused):  # and the source does
                await thief.fetch(offer.handle, offer.ticket, rig.destination(), deadline)
            assert rig.source.counters["ticket_refused"] == 1

    asyncio.run(main())


def test_expired_lease(name):
    async def main():
        async with running(name, ttl_s=0.1) as rig:
            offer = rig.ready_offer()
            await rig.wait_released("k")
            assert not rig.source.renew(offer.lease_id)
            with pytest.raises(errors.LeaseExpired):
                await rig.fetch(offer, rig.destination())
            assert rig.source.counters["lease_expired"] == 1

    asyncio.run(main())


def test_replay_of_a_finished_transfer(name):
    async def main():
        async with running(name) as rig:
            offer = rig.ready_offer()
            await rig.fetch(offer, rig.destination())
            await rig.wait_released("k")
            with pytest.raises(errors.LeaseExpired):
                await rig.fetch(offer, rig.destination())

    asyncio.run(main())


def test_generation_bumped_while_reading(name, small_ranges):
    """Blocks of the source given to somebody else between Ready and Ack: Confirm never comes."""

    async def main():
        async with running(name) as rig:

            def fault(frame, line):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 64:
                    rig.generation[int(rig.source_ids[4])] += 1
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(errors.StaleBlocks):
                await rig.fetch(rig.ready_offer(), destination)
            assert destination.upto in ([], [64])
            rig.generation[int(rig.source_ids[4])] -= 1
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


def test_destination_loses_its_blocks(name, small_ranges):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            offer = rig.offer(num_ready_tokens=64)
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until(lambda: destination.upto == [64], "the first span")
            destination.blocks = [block._replace(generation=2) for block in destination.blocks]
            rig.source.finish("k")
            with pytest.raises(errors.StaleBlocks):
                await fetching
            assert destination.upto == [64]

    asyncio.run(main())


def test_destination_is_full(name):
    class Full(Destination):
        def set_aside(self, upto_token):
            raise MemoryError("no blocks")

    async def main():
        async with running(name) as rig:
            with pytest.raises(MemoryError):
                await rig.fetch(rig.ready_offer(), Full([]))
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


# ---- bytes and frames that are wrong ----


@pytest.mark.parametrize("token, cell", ((0, 0), (170, 5), (299, 11)))
def test_a_flipped_bit_is_found(name, token, cell, small_ranges):
    """First, middle and last token; after the source has digested them."""

    async def main():
        async with running(name) as rig:
            block, row = int(rig.source_ids[token // 16]), token % 16
            byte = block * rig.layout.block_bytes + (cell * 16 + row) * 32 + 7

            def fault(frame, line):
                if kind(frame) == "ready" and frame.ready.range.token_begin <= token < frame.ready.range.token_end:
                    rig.source_pool[byte] ^= 0x10
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(errors.DigestMismatch):
                await rig.fetch(rig.ready_offer(), destination)
            assert not destination.upto or destination.upto[-1] <= token
            await until(lambda: rig.source.counters["taker_digest_mismatch"] == 1, "the source hears of it")
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


def _drop_digests(frame):
    del frame.ready.digests[:]


def _drop_one_digest(frame):
    frame.ready.digests.pop()


def _other_digest(frame):
    frame.ready.digests[3] ^= 1


def _beyond_the_end(frame):
    frame.ready.range.token_end = NUM_TOKENS + 64


def _backwards(frame):
    frame.ready.range.token_begin, frame.ready.range.token_end = 64, 0


def _too_many_layers(frame):
    frame.ready.range.layer_end = 9


def _half_a_span(frame):
    frame.ready.range.token_end -= 1


def _gap(frame):
    frame.ready.range.token_begin += 64


def _wrong_payload(frame):
    frame.ready.payload_bytes += 1


def _other_generation(frame):
    frame.ready.generations[0] += 1


def _no_generations(frame):
    del frame.ready.generations[:]


BAD_READY = (
    (_drop_digests, errors.DigestMismatch), (_drop_one_digest, errors.DigestMismatch),
    (_other_digest, errors.DigestMismatch), (_beyond_the_end, errors.ProtocolError), (_backwards, errors.ProtocolError),
    (_too_many_layers, errors.ProtocolError), (_half_a_span, errors.ProtocolError), (_gap, errors.ProtocolError),
    (_wrong_payload, errors.ProtocolError), (_other_generation, errors.StaleBlocks),
    (_no_generations, errors.StaleBlocks),
)  # fmt: skip


@pytest.mark.parametrize("spoil, error", BAD_READY, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_ready_is_refused(name, spoil, error, small_ranges):
    async def main():
        async with running(name) as rig:

            def fault(frame, line):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 64:
                    spoil(frame)
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(error):
                await rig.fetch(rig.ready_offer(), destination)
            assert destination.upto in ([], [64]), "nothing of the bad range is verified"
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


@pytest.mark.parametrize("order", ("twice", "swapped", "confirm_unasked"))
def test_frames_out_of_turn(name, order, small_ranges):
    async def main():
        async with running(name) as rig:
            held = []

            def fault(frame, line):
                begin = frame.ready.range.token_begin
                if kind(frame) != "ready" or name == "tcp" and order != "confirm_unasked" and begin > 128:
                    return [frame]
                if order == "twice":
                    return [frame, frame]
                if order == "swapped" and begin == 64:
                    held.append(frame)
                    return []
                if order == "confirm_unasked":
                    confirm = kv_pb2.Confirm(range=frame.ready.range, num_tokens_confirmed=NUM_TOKENS)
                    return [kv_pb2.KVFrame(confirm=confirm)] if begin == 64 else [frame]
                return [frame, *held]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(errors.ProtocolError):
                await rig.fetch(rig.ready_offer(), destination)
            assert destination.upto in ([], [64])
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


def test_swapped_requests_are_found(name):
    """The digest is bound to the names of the spans: another request's announcement does not fit."""

    async def main():
        async with running(name) as rig:
            offer = rig.ready_offer()
            handle = wire.decode_handle(offer.handle)
            other = tuple(bytes([200 + index]) * 32 for index in range(len(handle.span_hashes)))
            object.__setattr__(handle, "span_hashes", other)
            destination = rig.destination()
            with pytest.raises(errors.DigestMismatch):
                await rig.fetch(offer._replace(handle=wire.encode_handle(handle)), destination)
            assert destination.upto == []

    asyncio.run(main())


def _spoiled(handle, **changes):
    for field, value in changes.items():
        object.__setattr__(handle, field, value)
    return wire.encode_handle(handle)


def test_bad_handles_are_refused_before_anything(name):
    async def main():
        async with running(name) as rig:
            offer, destination = rig.ready_offer(), rig.destination()
            blocks = wire.decode_handle(offer.handle).blocks
            bad = (
                dict(blocks=()), dict(num_tokens=0), dict(num_tokens=NUM_TOKENS + 999), dict(span_hashes=()),
                dict(parts=()), dict(lease_id=b"short"), dict(layout=layout(32)), dict(layout=layout(16, "fp16")),
                dict(numerics_class="other"), dict(blocks=blocks[:-1]), dict(blocks=(blocks[0],) * len(blocks)),
            )  # fmt: skip
            for changes in bad:
                handle = _spoiled(wire.decode_handle(offer.handle), **changes)
                with pytest.raises(errors.KVError):
                    await rig.fetch(offer._replace(handle=handle), destination)
            with pytest.raises(errors.ProtocolError):
                await rig.fetch(offer._replace(handle=b"\xff\xff"), destination)
            assert destination.asked == [] and rig.source.counters["bytes_confirmed"] == 0
            await rig.fetch(offer, destination)

    asyncio.run(main())


@pytest.mark.parametrize("name", ("inproc", "shm"))
def test_blocks_beyond_the_sources_pool(name):
    async def main():
        async with running(name) as rig:
            offer, destination = rig.ready_offer(), rig.destination()
            handle = wire.decode_handle(offer.handle)
            far = tuple(block._replace(block_id=1_000_000 + index) for index, block in enumerate(handle.blocks))
            with pytest.raises(errors.ProtocolError, match="beyond a pool"):
                await rig.fetch(offer._replace(handle=_spoiled(handle, blocks=far)), destination)
            assert destination.upto == []

    asyncio.run(main())


def test_foreign_blocks_of_the_destination(name):
    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            destination.blocks[2] = destination.blocks[2]._replace(block_id=-1)
            with pytest.raises(errors.KVError):
                await rig.fetch(rig.ready_offer(), destination)

    asyncio.run(main())


def test_unequal_layouts_are_refused_with_both_printed(name):
    async def main():
        async with running(name, layout(16), taker_shape=layout(32)) as rig:
            with pytest.raises(errors.LayoutMismatch) as refused:
                rig.offer()
            assert "block_size=16" in str(refused.value) and "block_size=32" in str(refused.value)
            assert rig.source.num_leases == 0

    asyncio.run(main())


def test_source_refuses_bad_offers(name):
    async def main():
        async with running(name) as rig:
            taker = rig.fetcher.taker()
            for blocks, num_tokens in (([], 0), ([], 10), (rig.destination().blocks[:3], 64)):
                with pytest.raises(ValueError):
                    rig.source.offer("k", blocks, num_tokens, [], bytes(32), taker)
            with pytest.raises(errors.ProtocolError):
                foreign = [block._replace(block_id=99) for block in rig.destination(64).blocks]
                rig.source.offer("k", foreign, 64, [bytes(32)], bytes(32), taker)
            rig.offer()
            with pytest.raises(ValueError, match="has a lease"):
                rig.offer()

    asyncio.run(main())


def _say(*frames):
    """What a hostile taker sends instead of a dialogue."""
    return [wire.encode_frame(frame) for frame in frames]


NOISE = (
    [b"\0" * 64], [b"GET / HTTP/1.1\r\n\r\n"], [b"KV\x01\x00\xff\xff\xff\xff"], [b"KV\x02\x00\x00\x00\x00\x00"],
    [b"KV\x01\x00\x00\x00\x00\x00"], _say(kv_pb2.KVFrame(ack=kv_pb2.Ack())), _say(kv_pb2.KVFrame(want=kv_pb2.Want())),
)  # fmt: skip


@pytest.mark.parametrize("name", ("shm", "tcp"))
@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
def test_noise_on_the_line(name, noise):
    async def main():
        async with running(name) as rig:
            address = next(e.address for e in rig.source.endpoints() if e.transport == name)
            if name == "tcp":
                reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
            else:
                reader, writer = await asyncio.open_unix_connection(address)
            writer.writelines(noise)
            writer.write_eof()
            async with asyncio.timeout(10):
                answer = await reader.read()
            writer.close()
            end = wire.decode_frame(answer[wire.HEADER_BYTES :])
            assert kind(end) == "end" and end.end.status in ("protocol_error", "ticket_refused")
            assert rig.source.num_leases == 0
            await assert_still_serves(rig)

    asyncio.run(main())


def test_new_line_takes_over(name):
    """The taker comes back before the source has noticed that the old line is dead."""

    async def main():
        async with running(name) as rig:
            offer, first = rig.offer(num_ready_tokens=64), rig.destination()
            second = rig.destination(num_cached_tokens=64)
            old = asyncio.create_task(rig.fetch(offer, first))
            await until(lambda: first.upto == [64], "the first span")
            new = asyncio.create_task(rig.fetch(offer, second))
            await asyncio.sleep(0.02)
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
            rig.source.finish("k")
            await new
            assert second.upto[-1] == NUM_TOKENS and rig.arrived(64)

    asyncio.run(main())


def test_same_pool_is_mapped_once():
    async def main():
        async with running("shm") as rig:
            await rig.fetch(rig.ready_offer("a"), rig.destination())
            await rig.fetch(rig.ready_offer("b"), rig.destination())
            assert len(rig.fetcher._mappings._mapped) == 1
            memory = next(iter(rig.fetcher._mappings._mapped.values())).memory
            with pytest.raises(ValueError):
                memory.blocks[0, 0] = 1  # another process's pool can be read, not written

    asyncio.run(main())


class Chaos:
    """One frame in `every` meets an accident; seeded."""

    def __init__(self, rig, seed: int, every: int):
        self.rig, self.random, self.every = rig, random.Random(seed), every

    def __call__(self, frame, line):
        if self.random.randrange(self.every):
            return [frame]
        accident = self.random.choice(("break", "twice", "flip", "digest"))
        if accident == "break":
            line.close()
            return []
        if accident == "flip" and kind(frame) == "ready":
            token = self.random.randrange(frame.ready.range.token_begin, frame.ready.range.token_end)
            byte = int(self.rig.source_ids[token // 16]) * self.rig.layout.block_bytes + token % 16 * 32
            self.rig.source_pool[byte] ^= 1 << self.random.randrange(8)
        if accident == "digest" and len(frame.ready.digests):
            frame.ready.digests[0] ^= 1 << self.random.randrange(64)
        return [frame, frame] if accident == "twice" and kind(frame) != "ready" else [frame]


@pytest.mark.parametrize("every", (4, 16))
def test_accidents_never_let_wrong_bytes_through(name, every, small_ranges, monkeypatch):
    """What was verified is what the source holds, every lease ends, and a healthy request behind it succeeds."""
    monkeypatch.setattr("kvtransfer.fetcher._PAUSES_S", (0.001, 0.001))

    async def main():
        async with running(name, ttl_s=1.0) as rig:
            outcomes, kept = set(), rig.source_pool.copy()
            for seed in range(25):
                rig.source_pool[:], rig.taker_pool[:] = kept, 0
                offer, destination = rig.ready_offer(seed), rig.destination()
                rig.source.fault = Chaos(rig, seed, every)
                try:
                    await rig.fetch(offer, destination)
                    outcomes.add("ok")
                except errors.KVError as exc:
                    outcomes.add(exc.status)
                assert rig.arrived(0, destination.upto[-1] if destination.upto else 0)
                assert destination.upto == sorted(set(destination.upto))
                rig.source.cancel(seed)
            assert "ok" in outcomes and len(outcomes) > 1
            assert sorted(rig.released) == list(range(25))
            await assert_still_serves(rig)

    asyncio.run(main())


def test_a_pool_that_cannot_be_mapped_has_no_shm():
    async def main():
        async with running("tcp") as rig:
            plain = Source(
                bytearray(rig.layout.block_bytes), rig.layout, rig.source.identity, "host", print,
                generations=int, region=None,
            )  # fmt: skip
            await plain.start("127.0.0.1", advertise_host="kv.example")
            assert [endpoint.transport for endpoint in plain.endpoints()] == ["inproc", "tcp"]
            assert plain.endpoints()[1].address.startswith("kv.example:")
            await plain.stop()

    asyncio.run(main())


def test_stop_leaves_no_socket_behind():
    async def main():
        async with running("shm") as rig:
            path = Path(next(e.address for e in rig.source.endpoints() if e.transport == "shm"))
            assert path.is_socket() and path.parent.stat().st_mode & 0o777 == 0o700
            await rig.source.stop()
            assert not path.parent.exists()

    asyncio.run(main())


def test_next_transport_when_the_best_cannot_be_reached():
    async def main():
        async with running("shm") as rig:
            both = Fetcher(
                rig.regions[1].memory, rig.layout, b"decode-0", 22, local_host_id(), ("shm", "tcp"),
                numerics_class=NUMERICS,
            )  # fmt: skip
            Path(next(e.address for e in rig.source.endpoints() if e.transport == "shm")).unlink()
            offer = rig.ready_offer()
            report = await both.fetch(offer.handle, offer.ticket, rig.destination(), time.monotonic() + 10)
            assert report.transport == "tcp" and rig.arrived()
            assert report.reason.startswith("tcp, because shm: the source cannot be reached")
            both.close()

    asyncio.run(main())
