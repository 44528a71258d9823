"""How gateways are reached: a name with several addresses, several names, proxies, public certificates."""

import copy
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from baton.client import CallError, Client, RetryPolicy
from baton.client.retries import Addresses
from baton.service.errors import Overloaded
from baton.v1 import inference_pb2 as pb
from tests.client.conftest import NUM_TOKENS, ScriptedGateway, answer_of, serving
from tests.support.client import gather
from tests.support.pace import patience
from tests.support.process import ROOT
from tests.support.security.installation import install

QUICK = RetryPolicy(first_pause_s=0.001, longest_pause_s=0.002)
PROGRAM = """
import sys
from baton.client import Client
with Client(sys.argv[1], tls=True, timeout_s=20) as client:
    print(client.model_info().name)
"""


def test_calls_go_to_all_addresses_of_a_name():
    with serving(ScriptedGateway()) as first, serving(ScriptedGateway()) as second:
        with Client([f"ipv4:{first.target},{second.target}"], retry=QUICK) as client:
            until = time.monotonic() + patience(10)
            while not (first.requests and second.requests):
                assert time.monotonic() < until
                client.generate("a")


def test_a_stream_goes_on_at_another_address_of_a_name():
    with serving(ScriptedGateway()) as first, Client([f"ipv4:127.0.0.1:9,{first.target}"], retry=QUICK) as client:
        for _ in range(3):
            first.script = [(2, None)]
            assert gather(client.stream("a")).token_ids == list(range(NUM_TOKENS))


class NameServer:
    """A DNS of one name, which has one address at a time."""

    def __init__(self):
        self.address = "127.0.0.1"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))

    def _serve(self) -> None:
        with self._socket:
            while (asked := self._socket.recvfrom(512))[0]:
                query, sender = asked
                end = query.index(b"\0", 12) + 5  # of the question: a name, a type, a class
                has_one = query[end - 4 : end - 2] == TYPE_A
                answer = NAME_OF_THE_QUESTION + TYPE_A + CLASS_IN + b"\0\0\0\0\0\x04" + socket.inet_aton(self.address)
                counts = bytes((0, 1, 0, has_one, 0, 0, 0, 0))
                self._socket.sendto(query[:2] + b"\x81\x80" + counts + query[12:end] + answer * has_one, sender)


TYPE_A, CLASS_IN, NAME_OF_THE_QUESTION = b"\0\1", b"\0\1", b"\xc0\x0c"


def test_a_name_that_has_another_address_is_looked_up_while_a_call_is_tried():
    """As when the one gateway of a headless Service is replaced."""
    names = NameServer()
    try:
        with serving(ScriptedGateway()) as first:
            port = first.target.rpartition(":")[2]
            client = Client(f"dns://127.0.0.1:{names.port}/gateways.test:{port}")
            assert client.model_info().name == "demo"
        names.address = "127.0.0.2"
        with serving(ScriptedGateway(), at=f"127.0.0.2:{port}"), client:
            assert client.model_info().name == "demo"
    finally:
        names.close()


def test_clients_of_several_addresses_begin_at_any():
    begun = {Addresses("a:1,b:1", str).current()[1] for _ in range(100)}
    assert begun == {"a:1", "b:1"}


class CuttingProxy:
    """Stands before a gateway that dies after two messages: HTTP/2 in a few lines, in whose words such a stream is
    reset."""

    def __init__(self, code: int):
        self._code, self._listener = code, socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as reader:
            reader.read(24)  # the preface
            connection.sendall(frame(SETTINGS, 0, 0))
            while head := reader.read(9):
                payload = reader.read(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind in (SETTINGS, PING) and not flags & ACK:
                    connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
                elif kind == DATA and flags & END_STREAM:
                    connection.sendall(b"".join(self._answer(stream, pb.GenerateRequest.FromString(payload[5:]))))

    def _answer(self, stream: int, request: pb.GenerateRequest) -> Iterator[bytes]:
        yield frame(HEADERS, END_HEADERS, stream, b"\x88\x5f\x10application/grpc")  # HPACK: :status 200, content-type
        for message in answer_of(request)[:2]:
            packed = message.SerializeToString()
            yield frame(DATA, 0, stream, b"\0" + len(packed).to_bytes(4, "big") + packed)
        yield frame(RST_STREAM, 0, stream, self._code.to_bytes(4, "big"))


DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK, END_STREAM, END_HEADERS = 1, 1, 4
NO_ERROR, INTERNAL_ERROR = 0, 2


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return b"".join([len(payload).to_bytes(3, "big"), bytes((kind, flags)), stream.to_bytes(4, "big"), payload])


@pytest.mark.parametrize("code", [NO_ERROR, INTERNAL_ERROR])
def test_a_stream_that_a_proxy_resets_goes_on(gateways, monkeypatch, code):
    monkeypatch.setattr("baton.client.retries.random.randrange", lambda stop: 0)
    (second,), proxy = gateways(1), CuttingProxy(code)
    try:
        with Client([proxy.target, second.target], retry=QUICK) as client:
            stream = client.stream("a")
            assert gather(stream).token_ids == list(range(NUM_TOKENS)) and stream.num_resumed == 1
    finally:
        proxy.close()


def test_public_authorities(tmp_path):
    """A program of its own: gRPC reads them once."""
    made = install(tmp_path / "certs")
    key, chain = ((made.folder / f"gateway.{kind}").read_bytes() for kind in ("key", "crt"))
    with serving(ScriptedGateway(), grpc.ssl_server_credentials([(key, chain)])) as gateway:
        env = os.environ | {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(made.folder / "ca.crt"), "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-c", PROGRAM, gateway.target.replace("127.0.0.1", "localhost")]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=patience(60))
        assert done.stdout == "demo\n", done.stderr
        with Client(gateway.target, tls=True, retry=QUICK, timeout_s=20) as client, pytest.raises(CallError):
            client.model_info()  # nobody public has signed it


def test_an_error_is_copied_and_sent_to_another_process(gateways):
    (gateway,) = gateways(1)
    gateway.script = [(0, Overloaded("full", 7.0))]
    with Client(gateway.target, timeout_s=5) as client, pytest.raises(CallError) as caught:
        list(client.stream("a"))
    error = caught.value
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(again), str(again), again.code(), again.details()) == (
            CallError, str(error), error.code(), error.details(),
        )  # fmt: skip
        assert (again.reason, again.retry_after_s) == ("OVERLOADED", 7.0)
        assert again.trailing_metadata() == error.trailing_metadata()
