"""What a caller is told of a call that failed: whether anything listens there, and which side speaks TLS."""

import os
import socket
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from baton.cli.main import main
from baton.service.net.client import explain_failure
from baton.service.security.access import Access
from baton.v1 import fleet_pb2 as pb
from baton.v1 import fleet_pb2_grpc

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def certs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "c"
    assert main(["certs", "--out", str(folder)]) == 0
    return folder


class Fleet(fleet_pb2_grpc.FleetServicer):
    def ListWorkers(self, request, context):
        return pb.ListWorkersResponse(workers=[pb.WorkerView(address=f"10.0.0.{n}:1") for n in range(200)])

    def ListRequests(self, request, context):
        return pb.ListRequestsResponse()


@pytest.fixture(scope="module")
def targets(certs):
    """A server without TLS and one with it."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(), server)
    pair = ((certs / "gateway.key").read_bytes(), (certs / "gateway.crt").read_bytes())
    ports = {
        "plain": server.add_insecure_port("127.0.0.1:0"),
        "tls": server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair])),
    }
    server.start()
    yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    server.stop(0)


def test_nothing_listens():
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unheard.getsockname()[1]}"
        told = explain_failure(target, UNAVAILABLE, "x", Access())
    assert told == f"nothing listens at {target}: is `baton up` running?"


def test_tls_on_one_side_only(targets, certs):
    assert "speaks TLS: give --tls-ca" in explain_failure(targets["tls"], UNAVAILABLE, "x", Access())
    trusting = Access(tls_ca=certs / "ca.crt")
    assert "speaks no TLS" in explain_failure(targets["plain"], UNAVAILABLE, "x", trusting)
    assert explain_failure(targets["tls"], UNAVAILABLE, "gone", trusting) == f"{targets['tls']}: UNAVAILABLE: gone"
    assert explain_failure(targets["plain"], UNAVAILABLE, "gone", Access()) == f"{targets['plain']}: UNAVAILABLE: gone"


def test_a_certificate_at_the_port_of_keys(certs):
    access = Access(*(certs / name for name in ("ca.crt", "operator.crt", "operator.key")))
    told = explain_failure("h:1", grpc.StatusCode.UNAUTHENTICATED, "x", access)
    assert "--api-key-file" in told and "fleet=" in told


def test_what_a_server_says_is_printable():
    told = explain_failure("h:1", grpc.StatusCode.INTERNAL, "\x1b[2J", Access())
    assert told.startswith("h:1: INTERNAL: ") and "\x1b" not in told


@pytest.mark.parametrize("command", [["top", "--once", "--target"], ["drain"], ["generate", "x", "--target"]])
def test_commands_say_it(command, capsys):
    assert main([*command, "127.0.0.1:9"]) == 1
    assert "nothing listens at 127.0.0.1:9: is `baton up` running?" in capsys.readouterr().err


def test_drain_of_what_is_no_worker(targets, capsys):
    assert main(["drain", targets["plain"]]) == 1
    assert "is no worker: give the gRPC address of one" in capsys.readouterr().err


def test_top_ends_quietly_with_its_reader(targets):
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "baton.cli", "top", "--once", "--target", targets["plain"]]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
