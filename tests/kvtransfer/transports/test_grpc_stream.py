"""Cases of the gRPC stream alone: a peer that reads no more, messages of any cut, no server behind the port."""

import asyncio
import gc
import socket
import weakref

import grpc
import pytest

from baton.v1 import kv_pb2
from kvtransfer import errors
from kvtransfer.transports import grpc_stream
from kvtransfer.wire import encode_frame
from tests.support.kvtransfer.rig import running
from tests.support.waiting import until_async


async def pair() -> tuple:
    """A taker's connection, the source's, and the listener to close."""
    connections: asyncio.Queue = asyncio.Queue()
    listener = await grpc_stream.listen("127.0.0.1", connections.put_nowait)
    taker = await grpc_stream.connect(f"127.0.0.1:{listener.port}")
    await taker.send(kv_pb2.KVFrame(renew=kv_pb2.Renew()))
    source = await connections.get()
    await source.receive()
    return taker, source, listener


def test_a_peer_that_reads_no_more_is_lost(monkeypatch):
    """Flow control holds the sender back: memory stays bounded, and the wait ends."""
    monkeypatch.setattr(grpc_stream, "SILENCE_S", 0.3)

    async def main():
        taker, source, listener = await pair()
        block, sent = memoryview(bytes(1 << 20)), []

        def endless():
            while True:
                sent.append(len(block))
                yield [block]

        with pytest.raises(errors.PeerLost, match="silent"):
            await source.send(kv_pb2.KVFrame(renew=kv_pb2.Renew()), endless())
        assert sum(sent) < 64 << 20
        source.close(), taker.close()
        await listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["it has everything", "its lease is cancelled", "it is cancelled"])
def test_a_fetch_that_has_ended_leaves_no_call_for_the_collector(how, monkeypatch):
    """With the call goes its connection: it was open for 20 s more."""
    calls = weakref.WeakSet()

    class Call(grpc_stream._TakerCall):
        def __init__(self, channel):
            super().__init__(channel)
            calls.add(self)

    async def main():
        async with running("grpc") as rig:
            fetching = asyncio.create_task(rig.fetch(rig.offer(), rig.destination()))
            await until_async(lambda: rig.source._context.dialogues, "the taker to come")
            assert len(calls) == 1
            if how == "it has everything":
                rig.source.finish("k")
            elif how == "it is cancelled":
                fetching.cancel()
            else:
                rig.source.cancel("k")
            await asyncio.gather(fetching, return_exceptions=True)
            await until_async(lambda: not calls, "the call to be gone")

    monkeypatch.setattr(grpc_stream, "_TakerCall", Call)
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("num_turns", range(8))
def test_a_connection_that_is_closed_as_it_begins_lets_go_of_its_call(num_turns):
    async def main():
        listener = await grpc_stream.listen("127.0.0.1", lambda connection: None)
        connection = await grpc_stream.connect(f"127.0.0.1:{listener.port}")
        call = weakref.ref(connection._call)
        sending = asyncio.create_task(connection.send(kv_pb2.KVFrame(renew=kv_pb2.Renew())))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        sending.cancel()
        connection.close()
        try:
            await until_async(lambda: call() is None, "the call to be gone")
        finally:
            await listener.close()

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_payload_in_messages_of_any_cut(monkeypatch):
    async def main():
        taker, source, listener = await pair()
        data = bytes(range(256)) * 5
        monkeypatch.setattr(grpc_stream, "CHUNK_BYTES", 100)
        await source.send(kv_pb2.KVFrame(renew=kv_pb2.Renew()), [[memoryview(data[:1030])], [memoryview(data[1030:])]])
        target = bytearray(len(data))
        await taker.receive()
        view = memoryview(target)
        await taker.receive_payload([[view[:7], view[7:640]], [view[640:]]])
        assert target == data
        await source.send(kv_pb2.KVFrame(renew=kv_pb2.Renew()), [[memoryview(data[:90])]])
        await taker.receive()
        with pytest.raises(errors.ProtocolError, match="10 bytes more"):
            await taker.receive_payload([[view[:80]]])
        source.close(), taker.close()
        await listener.close()

    asyncio.run(main())


def test_last_words_arrive_before_the_end():
    """`close` right behind an End, on either side."""

    async def main():
        for taker_ends in (True, False):
            taker, source, listener = await pair()
            first, second = (taker, source) if taker_ends else (source, taker)
            await first.send(kv_pb2.KVFrame(end=kv_pb2.End(status="ok")))
            first.close()
            assert (await second.receive()).end.status == "ok"
            with pytest.raises(errors.PeerLost):
                await second.receive()
            second.close()
            await listener.close()

    asyncio.run(main())


def test_nobody_behind_the_port():
    async def main():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            with pytest.raises(errors.PeerLost, match="cannot be reached"):
                await grpc_stream.connect(f"127.0.0.1:{sock.getsockname()[1]}")

    asyncio.run(main())


def test_a_proxy_is_not_for_kv(monkeypatch):
    """`http_proxy` is what hosts of a company reach the world by."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def main():
        taker, source, listener = await pair()
        taker.close(), source.close()
        await asyncio.gather(taker.ended.wait(), source.ended.wait())
        await listener.close()

    asyncio.run(main())


def test_another_service_behind_the_port():
    async def main():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        connection = await grpc_stream.connect(f"127.0.0.1:{port}")
        with pytest.raises(errors.PeerLost, match="UNIMPLEMENTED"):
            await connection.receive()
        connection.close()
        await server.stop(0)

    asyncio.run(main())


def test_messages_that_are_no_frames():
    async def main():
        async with running("grpc") as rig:
            address = next(e.address for e in rig.source.endpoints() if e.transport == "grpc")
            whole = encode_frame(kv_pb2.KVFrame(renew=kv_pb2.Renew()))
            for message in (b"", b"KV", whole + b"x", bytes(3 << 20)):
                async with grpc.aio.insecure_channel(address) as channel:
                    call = channel.stream_stream(f"/{grpc_stream.SERVICE}/{grpc_stream.METHOD}")(iter([message]))
                    try:
                        async with asyncio.timeout(10):
                            assert b"protocol_error" in b"".join([answer async for answer in call])
                    except grpc.aio.AioRpcError as exc:  # gRPC itself refuses what is too long
                        assert exc.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and len(message) > 1 << 20

    asyncio.run(main())
