"""Strangers at the doors of a source: few places and little time for them, and no taker waits for any."""

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from baton.v1 import kv_pb2
from kvtransfer import errors, wire
from kvtransfer.transfer import connections, pull, source_dialogue
from kvtransfer.transfer.ticket import parse_ticket
from kvtransfer.transports import grpc_stream, socket_folder
from kvtransfer.transports.socket_connection import SocketConnection
from tests.support.kvtransfer.rig import NUM_TOKENS, running
from tests.support.pace import patience
from tests.support.waiting import until_async

DOORS = ("cuda_ipc", "shm", "tcp", "grpc")
SOCKETS = DOORS[:3]
HEADER = wire.encode_frame(kv_pb2.KVFrame(want=kv_pb2.Want(taker_instance=b"x" * 9000)))[: wire.HEADER_BYTES]


def address_of(rig, name: str) -> str:
    return next(endpoint.address for endpoint in rig.source.endpoints() if endpoint.transport == name)


class Stranger:
    """Has no ticket. Says the header of a long frame; `say_more` one byte of the rest."""

    def __init__(self, name: str, address: str):
        if name == "tcp":
            host, port = address.rsplit(":", 1)
            self._sock = socket.create_connection((host, int(port)))
        else:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.connect(socket_folder.socket_path(socket_folder.default_parent(), address.partition("@")[0]))
        self._sock.sendall(HEADER)
        self._sock.setblocking(False)

    def say_more(self) -> bool:
        """False: the source has hung up."""
        try:
            self._sock.send(b"x")
            return bool(self._sock.recv(4096))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def hung_up(self) -> None:
        """Says a byte every 20 ms until the source has had enough."""
        async with asyncio.timeout(20):
            while self.say_more():
                await asyncio.sleep(0.02)

    def close(self):
        self._sock.close()


class GrpcStranger:
    """Opens a stream and says nothing."""

    def __init__(self, address: str):
        options = (("grpc.use_local_subchannel_pool", 1),)
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.call = self.channel.stream_stream(f"/{grpc_stream.SERVICE}/{grpc_stream.METHOD}")()

    async def hung_up(self) -> None:
        async with asyncio.timeout(20):
            while await self.call.read() is not grpc.aio.EOF:
                pass

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


class SilentConnection:
    def __init__(self):
        self.is_closed = False

    async def wait(self):
        await asyncio.Event().wait()

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("silent_s, num_places", [(-1.0, connections.MAX_SILENT), (1e9, connections.MAX_PENDING)])
async def test_the_oldest_stranger_goes(monkeypatch, silent_s, num_places):
    """Few connections stay silent for long; a burst is accepted."""
    monkeypatch.setattr(connections, "SILENT_S", silent_s)
    places, opened = connections.Connections(), [SilentConnection() for _ in range(num_places + 2)]
    for connection in opened:
        places.open(connection, connection.wait())
    assert [connection.is_closed for connection in opened] == [True, True] + [False] * num_places
    assert len(places) == num_places
    await asyncio.gather(*places.cancel(), return_exceptions=True)
    assert len(places) == 0 and all(connection.is_closed for connection in opened)


@pytest.mark.parametrize("name", SOCKETS)
def test_a_want_that_trickles_is_late(name, monkeypatch):
    """However many bytes come: the time is for the whole of it."""
    monkeypatch.setattr(source_dialogue, "WANT_S", 0.3)

    async def main():
        async with running(name) as rig:
            stranger = Stranger(name, address_of(rig, name))
            await stranger.hung_up()
            stranger.close()
            await until_async(lambda: rig.source.num_connections == 0, "the connection is closed on this side too")
            assert rig.source.counters["peer_lost"] == 1

    asyncio.run(main())


def test_a_stream_without_a_message_is_late(monkeypatch):
    monkeypatch.setattr(source_dialogue, "WANT_S", 0.3)

    async def main():
        async with running("grpc") as rig:
            stranger = GrpcStranger(address_of(rig, "grpc"))
            await stranger.hung_up()
            await stranger.close()
            await until_async(lambda: rig.source.num_connections == 0, "the stream is closed")

    asyncio.run(main())


async def test_bytes_that_trickle_are_no_frame(monkeypatch):
    """Also of a taker whose ticket is good: silence is counted over the frame, not from byte to byte."""
    ours, theirs = socket.socketpair()
    connection = SocketConnection(ours)
    monkeypatch.setattr(connection, "_silence_s", 0.3)
    theirs.sendall(HEADER)

    async def trickle():
        while True:
            theirs.send(b"x")
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    with pytest.raises(errors.PeerLost, match="frame"):
        async with asyncio.timeout(10):
            await connection.receive()
    trickling.cancel()
    connection.close()
    theirs.close()


async def _crowd(rig, name: str, count: int, each) -> None:
    """Open `count` strangers' connections, each kept as long as the source allows; call `each(index)` between them."""
    waiting = []
    for index in range(count):
        stranger = GrpcStranger(address_of(rig, name)) if name == "grpc" else Stranger(name, address_of(rig, name))
        waiting.append(stranger)
        if len(waiting) > 200:
            closing = waiting.pop(0).close()
            if closing:
                await closing
        await each(index)
    for stranger in waiting:
        if closing := stranger.close():
            await closing


@pytest.mark.parametrize("name, count", [("cuda_ipc", 1100), ("shm", 1100), ("tcp", 1100), ("grpc", 150)])
def test_a_crowd_of_strangers_delays_no_taker(name, count):
    """Every fetch beside them takes the one connection that it opens."""

    async def main():
        async with running(name) as rig:
            opened, open_door = [], rig.fetcher._dialer.open

            async def counted(endpoint, layout):
                opened.append(endpoint.transport)
                return await open_door(endpoint, layout)

            rig.fetcher._dialer.open = counted
            fetched = []

            async def each(index):
                assert rig.source.num_connections <= 2 * connections.MAX_PENDING
                if index % (count // 10) == 0:
                    fetched.append(f"k{index}")
                    rig.taker_pool[:] = 0
                    await rig.fetch(rig.ready_offer(fetched[-1]), rig.destination())
                    assert rig.arrived()
                elif index % 8 == 0:
                    await asyncio.sleep(0)

            await _crowd(rig, name, count, each)
            assert opened == [name] * len(fetched) and len(fetched) >= 10
            await rig.wait_released(*fetched)
            await until_async(lambda: rig.source.num_connections == 0, "all connections are closed")

    asyncio.run(main())


@pytest.mark.parametrize("name", DOORS)
def test_a_connection_that_has_shown_a_ticket_stays(name):
    """It takes none of the places of strangers."""

    async def main():
        async with running(name) as rig:
            destination = rig.destination()
            fetching = asyncio.create_task(rig.fetch(rig.offer(num_ready_tokens=64), destination))
            await until_async(lambda: destination.upto == [64], "the first span")

            async def each(index):
                await asyncio.sleep(0)

            await _crowd(rig, name, 3 * connections.MAX_SILENT, each)
            assert not fetching.done()
            rig.source.finish("k")
            await fetching
            assert rig.arrived() and destination.upto[-1] == NUM_TOKENS

    asyncio.run(main())


def test_each_transport_has_places_of_its_own():
    async def main():
        async with running(("shm", "tcp")) as rig:
            slow = Stranger("shm", address_of(rig, "shm"))
            await until_async(lambda: rig.source.num_connections == 1, "the first one is there")

            async def each(index):
                await asyncio.sleep(0)

            await _crowd(rig, "tcp", 2 * connections.MAX_SILENT, each)
            assert slow.say_more()
            slow.close()

    asyncio.run(main())


def test_as_many_takers_as_there_are_places(name, monkeypatch):
    """One more is turned away as from a connection that broke, and comes back."""
    monkeypatch.setattr(connections, "MAX_ESTABLISHED", 1)

    async def main():
        async with running(name) as rig:
            first, second = rig.destination(), rig.destination()
            fetching = asyncio.create_task(rig.fetch(rig.offer("a", num_ready_tokens=64), first))
            await until_async(lambda: first.upto == [64], "the first span")
            turned_away = asyncio.create_task(rig.fetch(rig.ready_offer("b"), second))
            await until_async(lambda: rig.source.counters["peer_lost"] > 0, "the second is turned away")
            rig.source.finish("a")
            await fetching
            await turned_away
            assert second.upto[-1] == NUM_TOKENS

    asyncio.run(main())


SOURCE = """
import asyncio, sys
from tests.support.kvtransfer.rig import running

async def main():
    async with running("grpc") as rig:
        print(rig.source.endpoints()[-1].address, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextlib.contextmanager
def source_process():
    """A source of its own, so that its memory is its own: (process, address)."""
    process = subprocess.Popen([sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        assert process.wait(60) == 0


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_source_takes_little_from_those_who_say_much():
    """300 streams of 6 messages: what a taker never says is refused by its length, what it may say waits outside. On a
    busy machine some have said nothing for so long that the dialogue is ended first, which is no error of the
    stream."""

    async def speak(address: str, num_bytes: int) -> tuple[grpc.StatusCode, bytes]:
        """How the stream ended, and what was said there."""
        said = b""
        async with grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            call = channel.stream_stream(f"/{grpc_stream.SERVICE}/{grpc_stream.METHOD}")()
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(30):
                    for _ in range(6):
                        await call.write(bytes(num_bytes))
                    while (message := await call.read()) is not grpc.aio.EOF:
                        said += message
            return await call.code(), said

    async def main():
        with source_process() as (process, address):
            await speak(address, 100)
            before = peak = _resident_bytes(process.pid)
            for num_bytes in (1 << 20, wire.MAX_TAKER_FRAME_BYTES):
                speaking = [asyncio.create_task(speak(address, num_bytes)) for _ in range(300)]
                while not all(task.done() for task in speaking):
                    peak = max(peak, _resident_bytes(process.pid))
                    await asyncio.sleep(0.05)
                if num_bytes > wire.MAX_TAKER_FRAME_BYTES:
                    ended_well = [
                        said for code, said in map(asyncio.Task.result, speaking) if code is grpc.StatusCode.OK
                    ]
                    others = {said for said in ended_well if b"no Want came" not in said}
                    assert others <= {b""}, "or the end came while it still wrote, and was not read"
            assert peak - before < 100 << 20, f"{(peak - before) >> 20} MiB more"

    asyncio.run(main())


# ---- tickets that were overheard ----


def test_a_ticket_that_is_in_use_is_refused(name, caplog, monkeypatch):
    """Instance and epoch are only claimed, so an eavesdropper can show a ticket; but not beside its taker."""
    monkeypatch.setattr(pull, "RENEW_S", 0.05)

    async def main():
        async with running(name) as rig:
            offer, destination, stolen = rig.offer(num_ready_tokens=64), rig.destination(), rig.destination()
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until_async(lambda: destination.upto == [64], "the first span")
            thief = rig.make_fetcher(b"decode-0", 22)
            with pytest.raises(errors.TicketRefused, match="another connection"):
                await thief.fetch(offer.handle, offer.ticket, stolen, float("inf"))
            assert stolen.upto == [] and "shown a second time" in caplog.text
            rig.source.finish("k")
            await fetching
            assert rig.arrived() and destination.upto[-1] == NUM_TOKENS

    asyncio.run(main())


def test_a_taker_that_fell_silent_gives_its_place(name, monkeypatch):
    """The same taker on a new connection, before the source could see that the old one is dead."""
    monkeypatch.setattr(pull, "RENEW_S", 60)
    monkeypatch.setattr(source_dialogue, "TAKEOVER_S", 0.2)
    monkeypatch.setattr("kvtransfer.transfer.fetcher._PAUSES_S", ())  # the silent one does not come back by itself

    async def main():
        async with running(name) as rig:
            offer, first, second = rig.offer(num_ready_tokens=64), rig.destination(), rig.destination()
            silent = asyncio.create_task(rig.fetch(offer, first))
            await until_async(lambda: first.upto == [64], "the first span")
            again = asyncio.create_task(rig.fetch(offer, second))
            await until_async(lambda: second.upto == [64], "the new connection is served")
            with pytest.raises(errors.PeerLost):
                await silent
            rig.source.finish("k")
            await again
            assert second.upto[-1] == NUM_TOKENS

    asyncio.run(main())


def test_a_taker_that_waits_for_its_place_is_no_stranger(name, monkeypatch):
    """A crowd of these, meanwhile, was a reason to hang up on it."""
    monkeypatch.setattr(pull, "RENEW_S", 60)
    monkeypatch.setattr(source_dialogue, "TAKEOVER_S", 0.2)
    monkeypatch.setattr(connections, "SILENT_S", -1.0)
    monkeypatch.setattr("kvtransfer.transfer.fetcher._PAUSES_S", ())  # one connection has to do
    waiting, crowd_is_over = asyncio.Event(), asyncio.Event()
    take_over = source_dialogue.SourceDialogue._take_over

    async def take_over_behind_the_crowd(self, earlier):
        waiting.set()
        await crowd_is_over.wait()
        await take_over(self, earlier)

    monkeypatch.setattr(source_dialogue.SourceDialogue, "_take_over", take_over_behind_the_crowd)

    async def main():
        async with running(name) as rig:
            offer, first, second = rig.offer(num_ready_tokens=64), rig.destination(), rig.destination()
            silent = asyncio.create_task(rig.fetch(offer, first))
            await until_async(lambda: first.upto == [64], "the first span")
            again = asyncio.create_task(rig.fetch(offer, second))
            await until_async(waiting.is_set, "the new connection has shown its ticket")
            opened = [SilentConnection() for _ in range(connections.MAX_SILENT + 2)]
            for connection in opened:
                rig.source._connections[name].open(connection, connection.wait())
            crowd_is_over.set()
            await until_async(lambda: second.upto == [64] or again.done(), "the new connection is served")
            rig.source.finish("k")
            await again
            assert second.upto[-1] == NUM_TOKENS
            await asyncio.gather(silent, return_exceptions=True)

    asyncio.run(main())


def test_a_ticket_is_worth_nothing_afterwards(name):
    """After its fetch, after its lease, and to another source."""

    async def main():
        async with running(name, ttl_s=patience(0.5)) as rig, running(name) as other:
            used, late, elsewhere = rig.ready_offer("used"), rig.offer("late"), rig.offer("elsewhere")
            await rig.fetch(used, rig.destination())
            await until_async(lambda: len(rig.released) == 3, "the leases have ended")
            stolen = rig.destination()
            for offer in (used, late):
                with pytest.raises((errors.LeaseExpired, errors.TicketRefused)):
                    await rig.make_fetcher(b"decode-0", 22).fetch(offer.handle, offer.ticket, stolen, float("inf"))
            parsed = parse_ticket(elsewhere.ticket)
            with pytest.raises(errors.TicketRefused, match="not minted"):
                other.source._context.mint.check(parsed, b"decode-0", 22)
            assert stolen.upto == []

    asyncio.run(main())
