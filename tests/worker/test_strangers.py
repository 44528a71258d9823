"""1,024 strangers at the plain KV port of a real prefill worker: handoffs beside them go as if they were alone."""

import itertools
import re
import resource
import socket
import statistics
import threading
import time

import pytest

from tests.support.client import Client
from tests.support.models import make_model
from tests.support.observe.probe import Probe
from tests.support.pace import patience
from tests.support.stack import Stack

NUM_STRANGERS = 1024


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    options = ("--num-blocks", "96", "--threads", "1", "--transports", "tcp")
    with Stack(
        make_model(folder / "model"), folder / "logs", options=options, gateway_options=("--split", "always")
    ) as s:
        yield s


@pytest.fixture
def descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * NUM_STRANGERS:
        pytest.skip(f"{2 * NUM_STRANGERS} descriptors are needed, {hard} allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * NUM_STRANGERS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _kv_port(stack) -> tuple[str, int]:
    probe = Probe(stack.address[stack.prefill[0].name])
    (endpoint,) = (each for each in probe.hello.endpoints if each.transport == "tcp")
    probe.close()
    host, port = endpoint.address.rsplit(":", 1)
    return host, int(port)


class Strangers:
    """Each says the header of a long frame and then a byte every 2 s; one that is disconnected connects again."""

    def __init__(self, address: tuple[str, int]):
        self._address, self._stop = address, threading.Event()
        self._socks: list[socket.socket | None] = [None] * NUM_STRANGERS
        self.num_came = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Strangers":
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._stop.set()
        self._thread.join()
        for sock in filter(None, self._socks):
            sock.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for index, sock in enumerate(self._socks):
                if self._stop.is_set():
                    return
                if sock is None or not _says(sock):
                    if sock is not None:
                        sock.close()
                    self._socks[index] = self._come()
            self._stop.wait(2.0)

    def _come(self) -> socket.socket | None:
        try:
            sock = socket.create_connection(self._address, timeout=2)
            sock.sendall(b"KV\x01\x00\x00\x00\x40\x00")
            sock.setblocking(False)
        except OSError:
            return None
        self.num_came += 1
        return sock


def _says(sock: socket.socket) -> bool:
    try:
        sock.send(b"x")
        return bool(sock.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.long
def test_handoffs_take_one_attempt(stack, descriptors):
    """Strangers on all slots once cost each handoff four attempts; a stalled machine may cost one or two."""
    client = Client(stack.target)
    client.generate([*range(20, 220)], temperature=0.0, max_tokens=4, ignore_eos=True)
    with Strangers(_kv_port(stack)) as strangers:
        deadline = time.monotonic() + patience(60)
        for index in itertools.count():
            client.generate([10 + index % 200, *range(20, 220)], temperature=0.0, max_tokens=4, ignore_eos=True)
            if strangers.num_came > 2 * NUM_STRANGERS or time.monotonic() > deadline:
                break
        assert strangers.num_came > 2 * NUM_STRANGERS
    client.close()
    attempts = re.findall(r"outcome=ok .*num_attempts=(\d+)", stack.text())
    assert len(attempts) == index + 2 and statistics.median(map(int, attempts)) == 1
