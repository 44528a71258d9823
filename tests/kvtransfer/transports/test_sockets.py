"""Folders of sockets: none stays behind for ever, whatever killed its owner. A connection that cannot be accepted does not
block others."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from baton.v1 import kv_pb2
from kvtransfer.errors import PeerLost
from kvtransfer.transports import socket_folder
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.socket_folder import SocketFolder, socket_path, sweep
from kvtransfer.transports.socket_line import SocketLine, SocketListener
from kvtransfer.wire import encode_frame

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
    lines, refusals = asyncio.Queue(), [refusal()]

    def make_line(sock: socket.socket) -> SocketLine:
        if refusals:
            raise refusals.pop()
        return SocketLine(sock)

    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind(("127.0.0.1", 0))
    listener = SocketListener(server, make_line, lines.put_nowait)
    takers = [socket.create_connection(server.getsockname()) for _ in range(2)]
    line = await asyncio.wait_for(lines.get(), 10)
    assert not refusals and lines.empty()
    line.close()
    await listener.close()
    for taker in takers:
        taker.close()


def lines() -> tuple[SocketLine, SocketLine]:
    one, other = socket.socketpair(socket.AF_UNIX)
    return SocketLine(one), SocketLine(other)


async def test_a_descriptor_is_watched_once_for_many_frames(monkeypatch):
    loop, watched = asyncio.get_running_loop(), []
    add_reader = loop.add_reader
    monkeypatch.setattr(loop, "add_reader", lambda fd, *args: (watched.append(fd), add_reader(fd, *args)))
    here, there = lines()
    for _ in range(20):
        receiving = asyncio.create_task(there.receive())
        await asyncio.sleep(0)  # it waits
        await here.send(RENEW)
        assert await receiving == RENEW
    assert len(watched) == 1
    here.close(), there.close()


async def test_what_nobody_asks_for_stays_with_the_system():
    """The loop does not read ahead without end, nor wake for bytes that are left where they are."""
    here, there = lines()
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
    here, there = lines()
    monkeypatch.setattr(there, "_silence_s", 0.2)
    receiving = asyncio.create_task(there.receive())
    for byte in encode_frame(RENEW)[:6]:
        here._sock.send(bytes([byte]))
        await asyncio.sleep(0.05)
    with pytest.raises(PeerLost, match="in the midst of a frame"):
        await receiving
    here.close(), there.close()


async def test_a_line_that_is_closed_wakes_who_waits():
    here, there = lines()
    receiving = asyncio.create_task(there.receive())
    await asyncio.sleep(0)
    there.close()
    with pytest.raises(PeerLost, match="the line was closed"):
        await receiving
    here.close()


def test_a_host_whose_name_leads_nowhere_says_what_to_do(monkeypatch):
    def lookup(name):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", lookup)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    with pytest.raises(
        OSError, match="name, node-7, leads to no address: Name or service not known; say by --advertise-host"
    ):
        Address("0.0.0.0").of("0.0.0.0", 5000)
    assert Address("0.0.0.0", "10.0.0.7").of("0.0.0.0", 5000) == "10.0.0.7:5000"


async def test_a_descriptor_that_finds_no_place_here_breaks_no_protocol():
    one, other = socket.socketpair()
    here, there = SocketLine(one), SocketLine(other, takes_fds=True)
    await here.send_with_fd(RENEW, one.fileno())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        with pytest.raises(PeerLost, match="no descriptor is left"):
            there._read_ahead()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        here.close(), there.close()
