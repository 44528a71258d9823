"""What a caller is told of a call that failed: whether anything listens there, and which side speaks TLS."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from baton.cli.cluster import doctor, findings
from baton.cli.main import main
from baton.cli.planning import scaler
from baton.service.net.client import _wrong_handshake, explain_failure
from baton.service.security.access import Access
from baton.v1 import fleet_pb2 as pb
from baton.v1 import fleet_pb2_grpc
from tests.support.pace import patience

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
    """A server without TLS, one with it, and one that asks for certificates."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(), server)
    pair = ((certs / "gateway.key").read_bytes(), (certs / "gateway.crt").read_bytes())
    ports = {
        "plain": server.add_insecure_port("127.0.0.1:0"),
        "tls": server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair])),
        "both": server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials([pair], (certs / "ca.crt").read_bytes(), True)
        ),
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


def test_a_name_that_is_not_known():
    told = explain_failure("nohost.invalid:5", UNAVAILABLE, "x", Access())
    assert told == "nohost.invalid:5 has a host name that is not known here: correct it, or the DNS of this host"


@pytest.mark.parametrize("command", ["generate x", "chat", "batch x.jsonl", "bench", "top", "doctor", "drain", "scale"])
@pytest.mark.parametrize("target", ["localhost", "127.0.0.1:99999", "http://127.0.0.1:50051"])
def test_what_is_no_address_is_wrong_use(command, target, capsys):
    flag = {"drain": [], "scale": ["--launcher"]}.get(command, ["--target"])
    with pytest.raises(SystemExit) as end:
        main([*command.split(), *flag, target])
    assert end.value.code == 2
    assert f"{target!r} is not HOST:PORT" in capsys.readouterr().err


def test_tls_on_one_side_only(targets, certs):
    assert "speaks TLS: give --tls-ca" in explain_failure(targets["tls"], UNAVAILABLE, "x", Access())
    trusting = Access(tls_ca=certs / "ca.crt")
    assert "speaks no TLS" in explain_failure(targets["plain"], UNAVAILABLE, "x", trusting)
    assert explain_failure(targets["tls"], UNAVAILABLE, "gone", trusting) == f"{targets['tls']}: UNAVAILABLE: gone"
    assert explain_failure(targets["plain"], UNAVAILABLE, "gone", Access()) == f"{targets['plain']}: UNAVAILABLE: gone"


def test_no_certificate_at_the_port_of_certificates(targets, certs, capsys):
    trusting = Access(tls_ca=certs / "ca.crt")
    told = explain_failure(targets["both"], UNAVAILABLE, "Socket closed", trusting)
    assert told.startswith(f"{targets['both']} asks for a certificate: give --tls-cert and --tls-key"), told
    told = explain_failure(targets["both"], UNAVAILABLE, "Socket closed", Access())
    assert told.endswith("give --tls-ca with the certificate of its authority, and --tls-cert and --tls-key"), told
    operator = Access(*(certs / name for name in ("ca.crt", "operator.crt", "operator.key")))
    assert explain_failure(targets["both"], UNAVAILABLE, "gone", operator) == f"{targets['both']}: UNAVAILABLE: gone"
    assert main(["top", "--once", "--target", targets["both"], "--tls-ca", str(certs / "ca.crt")]) == 1
    assert "asks for a certificate: give --tls-cert" in capsys.readouterr().err


@contextmanager
def showing(certs: Path, role: str, address: str, *, asks_for_one: bool):
    """Yield the address of a server that shows the certificate of a role."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pair = ((certs / f"{role}.key").read_bytes(), (certs / f"{role}.crt").read_bytes())
    authority = (certs / "ca.crt").read_bytes() if asks_for_one else None
    port = server.add_secure_port(address, grpc.ssl_server_credentials([pair], authority, asks_for_one))
    server.start()
    yield f"{address.rpartition(':')[0]}:{port}"
    server.stop(0)


def fails_at(target: str, access: Access) -> str:
    with access.channel(target, blocking=True) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/a/b")(b"", timeout=patience(10))
    return explain_failure(target, raised.value.code(), raised.value.details(), access)


def test_a_handshake_that_fails_is_told_in_our_words(targets, certs, tmp_path):
    assert main(["certs", "--out", str(tmp_path / "other")]) == 0
    (tmp_path / "text").write_text("text")
    told = fails_at(targets["tls"], Access(tmp_path / "other" / "ca.crt"))
    assert "that --tls-ca does not prove (unable to get local issuer certificate): give the ca.crt of its" in told
    assert "cannot be asked with --tls-ca: give PEM files" in fails_at(targets["tls"], Access(tmp_path / "text"))
    mixed = Access(certs / "ca.crt", certs / "operator.crt", tmp_path / "other" / "operator.key")
    assert "with --tls-ca, --tls-cert and --tls-key: give PEM files" in fails_at(targets["both"], mixed)


def test_a_servers_certificate_that_has_expired_wants_another():
    """Another authority would prove it no better."""
    details = "Ssl handshake failed: SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: certificate has expired"
    assert _wrong_handshake(details, Access()) == (
        "shows a certificate that has expired",
        "renew it there, and look at both clocks",
    )


def test_the_certificate_of_another_name(certs):
    with showing(certs, "gateway", "127.0.0.2:0", asks_for_one=False) as target:
        told = fails_at(target, Access(certs / "ca.crt"))
    assert told.startswith(f"{target} shows a certificate without this name: `baton certs --out NEW --renew DIR --host")
    operator = Access(*(certs / name for name in ("ca.crt", "operator.crt", "operator.key")))
    with showing(certs, "decode", "127.0.0.1:0", asks_for_one=True) as target:
        assert fails_at(target, operator) == f"{target} shows the certificate of another role: correct the address"


def test_a_refused_credential_is_explained():
    told = explain_failure("h:1", grpc.StatusCode.UNAUTHENTICATED, "the key has expired", Access())
    assert (
        "UNAUTHENTICATED, the key has expired: give a valid --api-key-file, or --tls-cert" in told and "fleet=" in told
    )


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


def test_doctor_finds_nobody(capsys):
    assert main(["doctor", "--target", "127.0.0.1:9"]) == 1
    assert "gateway's log" not in (told := capsys.readouterr().out) and told.count("start it, or correct --target") == 2


def test_doctor_says_it(targets, certs, capsys):
    """And not that a gateway which answers has to be started, or that --target is to be given where it was."""
    assert main(["doctor", "--target", targets["tls"]]) == 1
    told = capsys.readouterr().out
    assert told.count("speaks TLS: give --tls-ca with the certificate of its authority") == 2, told
    assert main(["doctor", "--target", targets["both"], "--tls-ca", str(certs / "ca.crt")]) == 1
    told = capsys.readouterr().out
    assert told.count("asks for a certificate: give --tls-cert and --tls-key") == 2, told
    assert "no gateway answers" not in told and "no decode worker is known: the gateway does not tell" in told


async def test_doctor_tells_of_certificates_that_end(targets, certs, monkeypatch):
    """Ours, and those of servers that let nobody in any more; not of what has none."""
    operator = Access(*(certs / name for name in ("ca.crt", "operator.crt", "operator.key")))

    async def warned(days: float, access: Access = operator) -> dict[str, str]:
        at = SimpleNamespace(time=lambda: time.time() + 86400 * days, strftime=time.strftime, gmtime=time.gmtime)
        monkeypatch.setattr(findings, "time", at)
        report = findings.Findings(is_json=True)
        await findings.check_certificates([*targets.values(), "127.0.0.1:9", "nowhere"], access, report)
        return {each.where: each.text for each in report.found}

    assert await warned(350) == await warned(400, Access()) == {}
    shown = {targets["tls"], targets["both"], str(certs / "operator.crt")}
    for days, words in ((352, "ends on"), (366, "ended on")):
        told = await warned(days)
        assert told.keys() == shown
        assert all(re.fullmatch(rf"its certificate {words} \d{{4}}-\d\d-\d\d", each) for each in told.values())
    assert (await warned(366, Access(tls_ca=certs / "ca.crt"))).keys() == {targets["tls"], targets["both"]}


def test_doctor_looks_at_certificates_last(targets, monkeypatch):
    """It waits for each host that does not answer, and no hand-off is tried that would begin late."""
    before = []

    async def look(addresses, access, report):
        before.extend(each.part for each in report.found)

    monkeypatch.setattr(doctor, "check_certificates", look)
    assert main(["doctor", "--target", targets["plain"]]) == 1
    assert "decode" in before


async def test_the_scaler_says_it(targets, capsys):
    assert await scaler._look(targets["tls"], Access()) is None
    assert "speaks TLS: give --tls-ca" in capsys.readouterr().err


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
