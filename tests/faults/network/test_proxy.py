"""The proxy itself: each of its faults happens as described."""

import contextlib
import socket
import threading
import time

import pytest

from tests.support.faults.proxy import FaultProxy
from tests.support.pace import patience
from tests.support.waiting import until

PATIENCE_S = patience(20)


@contextlib.contextmanager
def echo():
    """A server that says everything back, until the client ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    threading.Thread(target=answer, args=(sock,), daemon=True).start()

        def answer(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                while data := sock.recv(1 << 16):
                    sock.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        host, port = server.getsockname()
        yield f"{host}:{port}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy():
    with echo() as address:
        proxy = FaultProxy(address)
        yield proxy
        proxy.close()


def connect(proxy: FaultProxy, timeout_s: float = PATIENCE_S) -> socket.socket:
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), timeout_s)


def said_back(sock: socket.socket, text: bytes) -> bytes:
    sock.sendall(text)
    return receive(sock, len(text))


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    got = b""
    while len(got) < num_bytes and (data := sock.recv(num_bytes - len(got))):
        got += data
    return got


TEXT = bytes(range(256)) * 40


def test_without_faults_it_is_a_wire(proxy):
    with connect(proxy) as sock:
        assert said_back(sock, TEXT) == TEXT
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


def test_a_stall_passes_nothing_and_loses_nothing(proxy):
    with connect(proxy) as sock:
        proxy.stall()
        sock.sendall(TEXT)
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(PATIENCE_S)
        proxy.heal()
        assert receive(sock, len(TEXT)) == TEXT


def test_one_way_stalls(proxy):
    with connect(proxy) as sock:
        proxy.stall(("down",))
        proxy.record()
        sock.sendall(b"heard")
        until(lambda: bytes(proxy.recorded) == b"heard")
        proxy.heal()
        assert receive(sock, 5) == b"heard"


def test_reset_and_refuse(proxy):
    with connect(proxy) as sock:
        assert said_back(sock, b"x") == b"x"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            while sock.recv(1):
                pass
    proxy.refuse()
    with pytest.raises(ConnectionError), connect(proxy) as sock:
        while True:
            said_back(sock, b"x")
    proxy.heal()
    with connect(proxy) as sock:
        assert said_back(sock, b"x") == b"x"


def test_slices_latency_and_bandwidth_change_no_byte(proxy):
    proxy.slice(7)
    proxy.delay(0.0005, 0.0004)
    proxy.throttle(1e7)
    with connect(proxy) as sock:
        assert said_back(sock, TEXT[:2000]) == TEXT[:2000]


def test_latency_is_waited_for(proxy):
    proxy.delay(0.2)
    with connect(proxy) as sock:
        sent = time.monotonic()
        assert said_back(sock, b"x") == b"x"
        assert time.monotonic() - sent >= 0.4


def test_data_is_cut_off(proxy):
    proxy.limit(100, "down")
    with connect(proxy) as sock:
        sock.sendall(TEXT)
        assert receive(sock, len(TEXT)) == TEXT[:100]


def test_one_bit_is_flipped(proxy):
    proxy.flip(123, "up")
    with connect(proxy) as sock:
        got = said_back(sock, TEXT)
        assert [index for index, (a, b) in enumerate(zip(got, TEXT, strict=True)) if a != b] == [123]
        assert (got[123] ^ TEXT[123]).bit_count() == 1 and proxy.num_flipped == 1
        assert said_back(sock, TEXT) == TEXT


def test_a_replay_is_said_again(proxy):
    proxy.record()
    with connect(proxy) as sock:
        said_back(sock, b"one two")
    assert proxy.replay(0.5) == b"one two"


def test_a_slow_close(proxy):
    proxy.slow_close(0.2)
    with connect(proxy) as sock:
        assert said_back(sock, b"x") == b"x"
        sent = time.monotonic()
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"" and time.monotonic() - sent >= 0.2
    until(lambda: proxy.num_open == 0)
