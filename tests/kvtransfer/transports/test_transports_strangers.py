"""Handles and first words that are wrong: refused before anything is allocated."""

import asyncio

import grpc
import pytest

from baton.v1 import kv_pb2
from kvtransfer import errors, wire
from kvtransfer.layout import KVGroup, KVLayout, PromptKV
from kvtransfer.transports import grpc_stream, socket_folder
from tests.support.kvtransfer.rig import NUM_TOKENS, assert_still_serves, kind, layout, running


def _spoiled(handle, **changes):
    for field, value in changes.items():
        object.__setattr__(handle if hasattr(handle, field) else handle.prompt, field, value)
    return wire.encode_handle(handle)


def test_bad_handles_are_refused_before_anything(name):
    async def main():
        async with running(name) as rig:
            offer, destination = rig.ready_offer(), rig.destination()
            blocks = wire.decode_handle(offer.handle).prompt.blocks
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


@pytest.mark.parametrize("name", ("inproc", "cuda_ipc", "shm"))
def test_blocks_beyond_the_sources_pool(name):
    async def main():
        async with running(name) as rig:
            offer, destination = rig.ready_offer(), rig.destination()
            handle = wire.decode_handle(offer.handle)
            far = tuple(block._replace(block_id=1_000_000 + index) for index, block in enumerate(handle.prompt.blocks))
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


def test_what_cannot_be_converted_is_refused_with_both_printed(name):
    async def main():
        other = KVLayout((KVGroup("paged", 3, 2, 32, "bf16", 16),))  # head_dim
        async with running(name, layout(16), taker_shape=other) as rig:
            with pytest.raises(errors.LayoutMismatch) as refused:
                rig.offer()
            assert "head_dim=16" in str(refused.value) and "head_dim=32" in str(refused.value)
            assert rig.source.num_leases == 0

    asyncio.run(main())


def test_source_refuses_bad_offers(name):
    async def main():
        async with running(name) as rig:
            taker = rig.fetcher.taker()
            for blocks, num_tokens in (([], 0), ([], 10), (rig.destination().blocks[:3], 64)):
                with pytest.raises(ValueError):
                    rig.source.offer("k", PromptKV(num_tokens, tuple(blocks), (), bytes(32)), taker)
            with pytest.raises(errors.ProtocolError):
                foreign = tuple(block._replace(block_id=99) for block in rig.destination(64).blocks)
                rig.source.offer("k", PromptKV(64, foreign, (bytes(32),), bytes(32)), taker)
            rig.offer()
            with pytest.raises(ValueError, match="has a lease"):
                rig.offer()

    asyncio.run(main())


def _say(*frames):
    """Return the encoded frames of a hostile taker."""
    return [wire.encode_frame(frame) for frame in frames]


NOISE = (
    [b"\0" * 64], [b"GET / HTTP/1.1\r\n\r\n"], [b"KV\x01\x00\xff\xff\xff\xff"], [b"KV\x02\x00\x00\x00\x00\x00"],
    [b"KV\x01\x00\x00\x00\x00\x00"], _say(kv_pb2.KVFrame(ack=kv_pb2.Ack())), _say(kv_pb2.KVFrame(want=kv_pb2.Want())),
)  # fmt: skip


async def _answer(rig, name: str, noise: list[bytes]) -> bytes:
    """Return all that the source answers to `noise`."""
    address = next(endpoint.address for endpoint in rig.source.endpoints() if endpoint.transport == name)
    if name == "grpc":
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(f"/{grpc_stream.SERVICE}/{grpc_stream.METHOD}")(iter(noise))
            return b"".join([message async for message in call])
    if name == "tcp":
        reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    else:
        path = socket_folder.socket_path(socket_folder.default_parent(), address.partition("@")[0])
        reader, writer = await asyncio.open_unix_connection(path)
    writer.writelines(noise)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("name", ("cuda_ipc", "shm", "tcp", "grpc"))
@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
def test_noise_on_the_line(name, noise):
    async def main():
        async with running(name) as rig:
            async with asyncio.timeout(10):
                answer = await _answer(rig, name, noise)
            end = wire.decode_frame(answer[wire.HEADER_BYTES :])
            assert kind(end) == "end" and end.end.status in ("protocol_error", "ticket_refused")
            assert rig.source.num_leases == 0
            await assert_still_serves(rig)

    asyncio.run(main())


@pytest.mark.parametrize("name", ("cuda_ipc", "shm", "tcp", "grpc"))
def test_half_closed_before_a_word(name):
    """A peer that connects and closes its half without a frame costs a connection, not a wait."""

    async def main():
        async with running(name) as rig:
            async with asyncio.timeout(10):
                assert await _answer(rig, name, []) == b""
            assert rig.source.counters["peer_lost"] == 1
            await assert_still_serves(rig)

    asyncio.run(main())
