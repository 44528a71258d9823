"""Bytes and frames that are wrong: none gets through any transport."""

import asyncio
import random

import pytest

from baton.v1 import kv_pb2
from kvtransfer import errors, wire
from kvtransfer.capabilities import CAPABILITIES
from tests.support.kvtransfer.rig import NUM_TOKENS, assert_still_serves, kind, running
from tests.support.waiting import until_async


@pytest.mark.parametrize("token, cell", ((0, 0), (170, 5), (299, 11)))
def test_a_flipped_bit_is_found(name, token, cell, small_ranges):
    """First, middle and last token; after the source has digested them."""

    async def main():
        async with running(name) as rig:
            block, row = int(rig.source_ids[token // 16]), token % 16
            byte = block * rig.layout.block_bytes + (cell * 16 + row) * 32 + 7

            def fault(frame, connection):
                if kind(frame) == "ready" and frame.ready.range.token_begin <= token < frame.ready.range.token_end:
                    rig.source_pool[byte] ^= 0x10
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(errors.DigestMismatch):
                await rig.fetch(rig.ready_offer(), destination)
            assert not destination.upto or destination.upto[-1] <= token
            await until_async(lambda: rig.source.counters["taker_digest_mismatch"] == 1, "the source hears of it")
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

            def fault(frame, connection):
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

            def fault(frame, connection):
                begin = frame.ready.range.token_begin
                follows = CAPABILITIES[name].source_sends and order != "confirm_unasked" and begin > 128
                if kind(frame) != "ready" or follows:
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
            other = tuple(bytes([200 + index]) * 32 for index in range(len(handle.prompt.span_hashes)))
            object.__setattr__(handle.prompt, "span_hashes", other)
            destination = rig.destination()
            with pytest.raises(errors.DigestMismatch):
                await rig.fetch(offer._replace(handle=wire.encode_handle(handle)), destination)
            assert destination.upto == []

    asyncio.run(main())


class Chaos:
    """One frame in `every` meets an accident; seeded."""

    def __init__(self, rig, seed: int, every: int):
        self.rig, self.random, self.every = rig, random.Random(seed), every

    def __call__(self, frame, connection):
        if self.random.randrange(self.every):
            return [frame]
        accident = self.random.choice(("break", "twice", "flip", "digest"))
        if accident == "break":
            connection.close()
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
    """Verified bytes equal the source's, every lease ends, and a healthy request behind it succeeds."""
    monkeypatch.setattr("kvtransfer.transfer.fetcher._PAUSES_S", (0.001, 0.001))

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
