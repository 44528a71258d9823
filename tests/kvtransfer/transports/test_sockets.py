"""Folders of sockets: none stays behind for ever, whatever killed its owner. A connection that cannot be accepted does
not block others."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from baton.v1 import kv_pb2
from kvtransfer.errors import PeerLost
from kvtransfer.transports import endpoints, grpc_stream, socket_folder, tcp
from kvtransfer.transports.endpoints import Address, num_ports
from kvtransfer.transports.socket_connection import SocketConnection, SocketListener
from kvtransfer.transports.socket_folder import SocketFolder, socket_path, sweep
from kvtransfer.wire import encode_frame
from tests.support.kvtransfer.rig import free_ports, running

RENEW = kv_pb2.KVFrame(renew=kv_pb2.Renew())
HOLD = """
import sys, pathlib, time
from kvtransfer.transports.socket_folder import SocketFolder
print(SocketFolder(pathlib.Path(sys.argv[1])).address, flush=True)
time.sleep(60)
"""


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(socket_folder, "_SETTLE_S", -1.0)


def test_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, settled):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().strip()
    mine = SocketFolder(tmp_path)
    assert (tmp_path / address).parent.is_dir(), "its owner lives"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    mine.remove()
    other = SocketFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [other.address.split("/")[0]]
    other.remove(), other.remove()
    assert not list(tmp_path.iterdir())


def test_folders_without_a_lock(tmp_path, settled):
    """As older versions left them: a listener on the socket decides."""
    living, dead = tmp_path / "baton-kv-living", tmp_path / "baton-kv-dead"
    for path in (living, dead):
        path.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as gone:
        listening.bind(str(living / "kv")), listening.listen()
        gone.bind(str(dead / "kv")), gone.listen(), gone.close()
        assert sweep(tmp_path) == ["baton-kv-dead"] and living.is_dir()


def test_what_is_young_or_no_folder_stays(tmp_path, monkeypatch):
    (tmp_path / "baton-kv-young").mkdir()
    (tmp_path / "baton-kv-file").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "baton-kv-link").symlink_to(tmp_path / "elsewhere")
    old = time.time() - 3600
    for name in ("baton-kv-file", "elsewhere"):
        os.utime(tmp_path / name, (old, old))
    assert sweep(tmp_path) == [] and len(list(tmp_path.iterdir())) == 4
    assert sweep(tmp_path / "nowhere") == []


def test_no_sockets_can_be_made(tmp_path):
    with pytest.raises(OSError, match="no KV sockets can be made in"):
        SocketFolder(tmp_path / "nowhere")
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(OSError, match="too long a path"):
        SocketFolder(deep)
    assert not list(deep.iterdir())


def test_an_address_never_leads_out_of_the_folder(tmp_path):
    assert socket_path(tmp_path, "baton-kv-abc_1/kv") == str(tmp_path / "baton-kv-abc_1" / "kv")
    for bad in ("/etc/passwd", "../baton-kv-a/kv", "baton-kv-a/../../kv", "baton-kv-a/kv\0", "baton-kv-a", ""):
        with pytest.raises(ValueError, match="names no socket"):
            socket_path(tmp_path, bad)


@pytest.mark.parametrize("refusal", [MemoryError, OSError])
async def test_the_next_one_is_accepted(refusal):
    connections, refusals = asyncio.Queue(), [refusal()]

    def make_connection(sock: socket.socket) -> SocketConnection:
        if refusals:
            raise refusals.pop()
        return SocketConnection(sock)

    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind(("127.0.0.1", 0))
    listener = SocketListener(server, make_connection, connections.put_nowait)
    takers = [socket.create_connection(server.getsockname()) for _ in range(2)]
    connection = await asyncio.wait_for(connections.get(), 10)
    assert not refusals and connections.empty()
    connection.close()
    await listener.close()
    for taker in takers:
        taker.close()


def connections() -> tuple[SocketConnection, SocketConnection]:
    one, other = socket.socketpair(socket.AF_UNIX)
    return SocketConnection(one), SocketConnection(other)


async def test_a_descriptor_is_watched_once_for_many_frames(monkeypatch):
    loop, watched = asyncio.get_running_loop(), []
    add_reader = loop.add_reader
    monkeypatch.setattr(loop, "add_reader", lambda fd, *args: (watched.append(fd), add_reader(fd, *args)))
    here, there = connections()
    for _ in range(20):
        receiving = asyncio.create_task(there.receive())
        await asyncio.sleep(0)  # it waits
        await here.send(RENEW)
        assert await receiving == RENEW
    assert len(watched) == 1
    here.close(), there.close()


async def test_what_nobody_asks_for_stays_with_the_system():
    """The loop does not read ahead without end, nor wake for bytes that are left where they are."""
    here, there = connections()
    frame = kv_pb2.KVFrame(ready=kv_pb2.Ready(hashes=bytes(1 << 19)))
    receiving = asyncio.create_task(there.receive())
    await asyncio.sleep(0)
    await here.send(RENEW)
    assert await receiving == RENEW
    sending = asyncio.create_task(here.send(frame))
    done, _ = await asyncio.wait([sending], timeout=0.1)
    assert not done and not there._watched and len(there._ahead) <= 1 << 15
    assert await there.receive() == frame
    await sending
    here.close(), there.close()


async def test_a_frame_that_trickles_is_as_good_as_none(monkeypatch):
    here, there = connections()
    monkeypatch.setattr(there, "_silence_s", 0.2)
    receiving = asyncio.create_task(there.receive())
    for byte in encode_frame(RENEW)[:6]:
        here._sock.send(bytes([byte]))
        await asyncio.sleep(0.05)
    with pytest.raises(PeerLost, match="in the midst of a frame"):
        await receiving
    here.close(), there.close()


async def test_a_line_that_is_closed_wakes_who_waits():
    here, there = connections()
    receiving = asyncio.create_task(there.receive())
    await asyncio.sleep(0)
    there.close()
    with pytest.raises(PeerLost, match="the connection was closed"):
        await receiving
    here.close()


@pytest.fixture
def host(monkeypatch):
    """Of the name node-7: `names` are the addresses that this leads to, `ways_out` those by which it reaches others."""
    names, ways_out = [], []

    def lookup(name, port, family, kind):
        found = [each for each in names if family == socket.AF_UNSPEC or ":" not in each]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 0, "", (each, 0)) for each in found]

    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(endpoints, "_ways_out", lambda with_ipv6: iter(ways_out))
    return SimpleNamespace(names=names, ways_out=ways_out)


@pytest.mark.parametrize(
    "listen, names, ways_out, found",
    [
        ("0.0.0.0", ["10.0.0.2"], [], "10.0.0.2"),
        ("0.0.0.0", ["127.0.1.1"], ["10.0.0.2"], "10.0.0.2"),  # as Debian's installer writes it
        ("0.0.0.0", ["127.0.1.1", "10.0.0.2"], ["10.0.0.3"], "10.0.0.2"),
        ("0.0.0.0", [], ["10.0.0.2"], "10.0.0.2"),
        ("0.0.0.0", ["127.0.1.1"], [], "127.0.1.1"),
        ("::", ["fd00::2"], [], "fd00::2"),
        ("::", ["fd00::2", "10.0.0.2"], [], "10.0.0.2"),
        ("::", ["::1"], ["fd00::2"], "fd00::2"),
        ("10.0.0.9", [], [], None),
    ],
)
def test_where_others_find_a_host_that_listens_everywhere(host, caplog, listen, names, ways_out, found):
    host.names[:], host.ways_out[:] = names, ways_out
    assert Address(listen).found().advertise_host == found
    assert ("127.0.1.1 alone" in caplog.text) == (found == "127.0.1.1")
    assert Address(listen, "10.0.0.7").found().of(listen, 5000) == "10.0.0.7:5000"


def test_a_host_whose_name_leads_nowhere_says_what_to_do(host):
    with pytest.raises(
        OSError, match="name, node-7, leads to no address: Name or service not known; say by --advertise-host"
    ):
        Address("0.0.0.0").found()


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_ports_that_a_firewall_may_open(transport):
    """They are those of one process alone, and of the next one at once."""
    first = free_ports(3)
    address = Address(first_port=first)
    for _ in range(2):
        async with running(transport) as rig:
            await rig.source.stop()
            await rig.source.start(address)
            found = {each.transport: each.address for each in rig.source.endpoints()}
            assert (found["grpc"], found["tcp"]) == (f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}")
            await rig.fetch(rig.ready_offer(), rig.destination())
            assert rig.arrived()
            for listen in (tcp.listen, grpc_stream.listen):
                with pytest.raises(OSError, match=f"cannot listen for KV on 127.0.0.1, port {first}: .*in use"):
                    await listen("127.0.0.1", print, port=first)


def test_ports_are_of_the_transports_that_are_used():
    address = Address(first_port=7000)
    assert [address.port_of("nixl", names) for names in (("shm", "nixl"), ("nixl", "tcp", "grpc"))] == [7000, 7002]
    assert num_ports(("shm", "nixl", "grpc")) == 2 and Address().port_of("tcp", ("tcp",)) == 0


async def test_a_name_with_an_address_that_does_not_answer(monkeypatch):
    """The next one is asked while there is time."""
    monkeypatch.setattr(tcp, "CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_server(("127.0.0.1", 0)) as server:
        waiting = [socket.socket() for _ in range(3)]  # with no room for more: what comes is dropped
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())

        async def resolve(host, port):
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each) for each in targets]

        monkeypatch.setattr(tcp, "_resolve", resolve)
        targets = [full.getsockname(), server.getsockname()]
        (await tcp.connected("source:1")).close()
        targets = [full.getsockname()]
        with pytest.raises(PeerLost, match="cannot be reached at source:1: no answer within 1 s"):
            await tcp.connected("source:1")
        for each in waiting:
            each.close()


@pytest.mark.parametrize(
    "address", ["kv..example:1", f"{'a' * 64}.example:1", "127.0.0.1:²", "127.0.0.1:" + "9" * 5000]
)
async def test_an_address_that_can_be_none(address):
    with pytest.raises(PeerLost, match="cannot be reached at"):
        await tcp.connected(address)


async def turns(counted: list[None]) -> None:
    while True:
        counted.append(None)
        await asyncio.sleep(0)


async def test_frames_that_keep_coming_leave_turns_to_others():
    """A taker that says Renew as fast as it goes stopped every session of the source's process meanwhile."""
    ours, theirs = socket.socketpair()
    connection, counted = SocketConnection(ours), []
    theirs.sendall(encode_frame(RENEW) * 1000)
    counting = asyncio.create_task(turns(counted))
    for _ in range(1000):
        assert await connection.receive() == RENEW
    assert len(counted) >= 10
    counting.cancel()
    connection.close(), theirs.close()


async def test_bytes_that_keep_coming_are_dropped_in_turns():
    """So that the time is up for a stranger, too, who sends faster than they are read."""
    connection, counted, left = SocketConnection(socket.socket()), [], [None] * 1000

    def receive(buffer: memoryview) -> int:
        return len(buffer) if left and not left.pop() else 0

    connection._sock = SimpleNamespace(shutdown=lambda how: None, recv_into=receive)
    counting = asyncio.create_task(turns(counted))
    await connection.drain()
    assert len(counted) >= 1000 - len(left) > 0
    counting.cancel()


async def test_a_descriptor_that_finds_no_place_here_breaks_no_protocol():
    one, other = socket.socketpair()
    here, there = SocketConnection(one), SocketConnection(other, takes_fds=True)
    await here.send_with_fd(RENEW, one.fileno())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        with pytest.raises(PeerLost, match="no descriptor is left"):
            there._read_ahead()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        here.close(), there.close()
