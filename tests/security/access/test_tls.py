"""Internal ports speak to holders of our certificates alone, and certificates change under load (S2, S5, H9)."""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.cluster.certs import NAMES, Authority
from baton.service.net import server as grpc_server
from baton.service.net.server import Health
from baton.service.security.access import Access
from baton.service.security.tls import WORKER_NAME, Tls
from baton.service.settings import SettingsError
from baton.v1 import kv_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker import registration
from kvtransfer.transports import grpc_stream
from tests.support.pace import patience
from tests.support.security.installation import Installation, install


async def check(channel: grpc.aio.Channel, timeout: float = 10) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
    return answer.status


class Serving:
    """A worker's port: health alone, certificates required."""

    def __init__(self, tls: Tls):
        self._tls = tls

    async def __aenter__(self) -> str:
        self._server = grpc_server.make_server()
        Health(self._server).set("", True)
        port = grpc_server.bind(self._server, "127.0.0.1:0", self._tls.server(require_certificate=True))
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def __aexit__(self, *exc) -> None:
        await self._server.stop(None)


def expired(installation: Installation, folder) -> Access:
    """A decode worker's certificate that was good until yesterday, made by openssl: we sign nothing for the past."""
    folder.mkdir()
    names = ",".join(f"DNS:{name}" for name in NAMES["decode"])
    (folder / "ext").write_text(f"subjectAltName={names}\nextendedKeyUsage=clientAuth\n")

    def openssl(*argv: str) -> None:
        subprocess.run(["openssl", *argv], check=True, capture_output=True, cwd=folder)

    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "key", "-out", "csr",
            "-subj", "/CN=old")  # fmt: skip
    ca = installation.folder
    openssl("x509", "-req", "-in", "csr", "-CA", str(ca / "ca.crt"), "-CAkey", str(ca / "ca.key"), "-days", "-1",
            "-extfile", "ext", "-out", "crt", "-set_serial", "7")  # fmt: skip
    return Access(ca / "ca.crt", folder / "crt", folder / "key")


async def test_who_gets_a_connection(installation, stranger, tmp_path):
    ours = installation.access("gateway")
    others = {
        "plaintext": Access(),
        "no certificate": installation.access(),
        "another authority": Access(ours.tls_ca, stranger.tls("gateway").cert, stranger.tls("gateway").key),
        "expired": expired(installation, tmp_path / "old"),
    }
    async with Serving(installation.tls("decode")) as address:
        async with ours.channel(address, name=WORKER_NAME) as channel:
            assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
            for name, access in others.items():
                async with access.channel(address, name=WORKER_NAME) as other:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await check(other)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, name
                assert await check(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_a_server_is_held_to_the_name_of_what_was_meant(installation, stranger):
    """A gateway's certificate does not make a worker, and another installation's worker is not ours."""
    access = installation.access("gateway")
    for tls in (installation.tls("gateway"), stranger.tls("decode")):
        async with Serving(tls) as address, access.channel(address, name=WORKER_NAME) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_clients_without_a_certificate_check_the_host(installation, guarded):
    async with guarded() as ports:
        async with installation.access().channel(ports.client) as channel:  # localhost is in the certificate
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(channel)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        other = ports.client.replace("localhost", "127.0.0.2")  # and this is not
        async with installation.access().channel(other) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tls_to_a_plaintext_port(installation):
    server = grpc_server.make_server()
    Health(server).set("", True)
    address = f"127.0.0.1:{grpc_server.bind(server, '127.0.0.1:0')}"
    await server.start()
    async with installation.access().channel(address) as channel, Access().channel(address) as plain:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await check(plain) == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused(installation):
    """TLS 1.2 at least."""

    async def main() -> None:
        async with Serving(installation.tls("decode")) as address:
            await asyncio.to_thread(shake, address)

    def shake(address: str) -> None:
        context = ssl.create_default_context(cafile=installation.folder / "ca.crt")
        context.load_cert_chain(installation.tls("gateway").cert, installation.tls("gateway").key)
        context.set_alpn_protocols(["h2"])
        for version, works in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = version
            context.set_ciphers("ALL:@SECLEVEL=0")
            host, port = address.split(":")
            with socket.create_connection((host, int(port)), timeout=5) as plain:
                try:
                    with context.wrap_socket(plain, server_hostname=WORKER_NAME) as secure:
                        assert works, secure.version()
                except (ssl.SSLError, ConnectionError):
                    assert not works, version

    asyncio.run(main())


# ---- rotation ----


def serial_of(address: str, access: Access) -> int:
    """Return the serial number of the certificate that the server shows to a new connection."""
    context = ssl.create_default_context(cafile=access.tls_ca)
    context.load_cert_chain(access.tls_cert, access.tls_key)
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        with context.wrap_socket(plain, server_hostname=WORKER_NAME) as secure:
            return int(secure.getpeercert()["serialNumber"], 16)


async def test_certificates_change_under_load(tmp_path, installation):
    """Calls on a standing connection and on new ones: none fails, and the new ones see the new certificate."""
    folder, fresh = tmp_path / "certs", tmp_path / "fresh"
    shutil.copytree(installation.folder, folder)
    ours, access = Installation(folder), Installation(folder).access("gateway")
    install(fresh, "--renew", str(folder))
    num_calls, stop = [0, 0], asyncio.Event()

    async def standing(address: str) -> None:
        async with access.channel(address, name=WORKER_NAME) as channel:
            while not stop.is_set():
                await check(channel)
                num_calls[0] += 1

    async def fresh_each_time(address: str) -> None:
        while not stop.is_set():
            async with access.channel(address, name=WORKER_NAME) as channel:
                await check(channel)
                num_calls[1] += 1

    async with Serving(ours.tls("decode")) as address:
        async with asyncio.TaskGroup() as group:
            group.create_task(standing(address))
            group.create_task(fresh_each_time(address))
            old = await asyncio.to_thread(serial_of, address, access)
            while min(num_calls) < 10:
                await asyncio.sleep(0.01)
            # The key of the server's own pair comes last: new connections amid this see the old pair.
            await asyncio.to_thread(replace_server_files, folder, fresh)
            before = tuple(num_calls)
            while min(num_calls[0] - before[0], num_calls[1] - before[1]) < 10:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(serial_of, address, access) != old
            stop.set()
    print(f"{sum(num_calls)} calls, 0 failed")


def replace_server_files(folder, fresh) -> None:
    for name in ("decode.crt", "decode.key"):
        shutil.copy(fresh / name, folder / f".{name}")
        os.replace(folder / f".{name}", folder / name)


async def test_both_sides_change_again_and_again_and_no_call_fails(tmp_path, installation):
    """A new connection for each call, while the files of both ends are replaced one by one, forty times."""
    folder = tmp_path / "certs"
    shutil.copytree(installation.folder, folder)
    authority, access = Authority.read(folder), Installation(folder).access("gateway")
    pairs = [(role, authority.issue(role, NAMES[role], 1)) for _ in range(20) for role in ("decode", "gateway")]
    num_calls, stop = 0, asyncio.Event()

    async def ask(address: str) -> None:
        nonlocal num_calls
        while not stop.is_set():
            async with access.channel(address, name=WORKER_NAME) as channel:
                await check(channel)
            num_calls += 1

    async with Serving(Installation(folder).tls("decode")) as address, asyncio.TaskGroup() as group:
        group.create_task(ask(address))
        for role, contents in pairs:
            for end, content in zip(("crt", "key"), contents, strict=True):
                before = num_calls
                (folder / ".new").write_bytes(content)
                os.replace(folder / ".new", folder / f"{role}.{end}")
                while num_calls < before + 2:  # amid it, with a pair that does not fit
                    await asyncio.sleep(0.001)
        stop.set()


class Registering(worker_pb2_grpc.RegistrationServicer):
    """A gateway's port for workers that register."""

    def __init__(self):
        self.has_come = asyncio.Event()

    async def Register(self, request, context) -> pb.RegisterResponse:
        self.has_come.set()
        return pb.RegisterResponse(ttl_s=30)


async def test_a_worker_whose_certificate_has_expired_registers_with_the_next_one(
    tmp_path, installation, monkeypatch, caplog
):
    folder, old = tmp_path / "certs", expired(installation, tmp_path / "old")
    shutil.copytree(installation.folder, folder)
    for name, path in (("decode.crt", old.tls_cert), ("decode.key", old.tls_key)):
        shutil.copy(path, folder / name)
    monkeypatch.setattr(registration, "PAUSE_S", 0.05)
    gateway, server = Registering(), grpc_server.make_server()
    worker_pb2_grpc.add_RegistrationServicer_to_server(gateway, server)
    port = grpc_server.bind(server, "127.0.0.1:0", installation.tls("gateway").server(require_certificate=True))
    await server.start()
    where = pb.RegisterRequest(address="127.0.0.1:1", role="decode")
    registering = asyncio.create_task(
        registration.register((f"127.0.0.1:{port}",), where, Installation(folder).access("decode"))
    )
    async with asyncio.timeout(patience(20)):
        while "not registered" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not gateway.has_come.is_set()
        replace_server_files(folder, installation.folder)
        await gateway.has_come.wait()
    registering.cancel()
    await asyncio.gather(registering, return_exceptions=True)
    await server.stop(None)


async def test_each_reason_for_which_a_worker_is_not_registered_is_told(tmp_path, installation, monkeypatch, caplog):
    """The gateway is started again, and meanwhile the worker's certificate has expired."""
    monkeypatch.setattr(registration, "PAUSE_S", 0.05)
    server = grpc_server.make_server()
    worker_pb2_grpc.add_RegistrationServicer_to_server(Registering(), server)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        where = pb.RegisterRequest(address="127.0.0.1:1", role="decode")
        old = expired(installation, tmp_path / "old")
        registering = asyncio.create_task(registration.register((address,), where, old))
        async with asyncio.timeout(patience(20)):
            while "Connection refused" not in caplog.text:
                await asyncio.sleep(0.01)
    grpc_server.bind(server, address, installation.tls("gateway").server(require_certificate=True))
    await server.start()
    async with asyncio.timeout(patience(20)):
        while f"Socket closed; {old.tls_cert} ended on 20" not in caplog.text:
            await asyncio.sleep(0.01)
    registering.cancel()
    await asyncio.gather(registering, return_exceptions=True)
    await server.stop(None)


async def test_a_pair_that_does_not_fit_changes_nothing(tmp_path, installation, stranger):
    folder = tmp_path / "certs"
    shutil.copytree(installation.folder, folder)
    access = installation.access("gateway")
    async with Serving(Installation(folder).tls("decode")) as address:
        old = await asyncio.to_thread(serial_of, address, access)
        shutil.copy(stranger.folder / "decode.key", folder / "decode.key")
        assert await asyncio.to_thread(serial_of, address, access) == old
        (folder / "decode.crt").write_text("half a fi")
        assert await asyncio.to_thread(serial_of, address, access) == old
        (folder / "decode.crt").unlink()
        assert await asyncio.to_thread(serial_of, address, access) == old


async def test_two_authorities_overlap(tmp_path, installation, stranger):
    """A bundle of both in --tls-ca lets callers of both in while the change lasts."""
    folder = tmp_path / "certs"
    shutil.copytree(installation.folder, folder)
    both = (installation.folder / "ca.crt").read_bytes() + (stranger.folder / "ca.crt").read_bytes()
    other = Access(installation.folder / "ca.crt", *[stranger.folder / f"gateway.{end}" for end in ("crt", "key")])
    async with Serving(Installation(folder).tls("decode")) as address:
        async with other.channel(address, name=WORKER_NAME) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await check(channel)
        (folder / "ca.crt").write_bytes(both)
        for access in (other, installation.access("gateway")):
            async with access.channel(address, name=WORKER_NAME) as channel:
                assert await check(channel) == health_pb2.HealthCheckResponse.SERVING


# ---- expiry ----

LIFE_S = 10


def short_lived(installation: Installation, folder: Path, role: str) -> Tls:
    """A certificate that is good for LIFE_S."""
    folder.mkdir()
    certificate, key = Authority.read(installation.folder).issue(role, NAMES[role], LIFE_S / 86_400)
    (folder / f"{role}.crt").write_bytes(certificate)
    (folder / f"{role}.key").write_bytes(key)
    return Tls(folder / f"{role}.crt", folder / f"{role}.key", installation.folder / "ca.crt")


async def refused(access: Access, address: str) -> bool:
    async with access.channel(address, name=WORKER_NAME) as channel:
        try:
            await check(channel)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_a_caller_whose_certificate_expires(installation, tmp_path):
    """Its connection stays, with the stream that runs on it and with new calls; no new one is made."""
    tls = short_lived(installation, tmp_path / "short", "gateway")
    access = Access(tls.ca, tls.cert, tls.key)
    async with Serving(installation.tls("decode")) as address, access.channel(address, name=WORKER_NAME) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(60):
            while not await refused(access, address):
                await asyncio.sleep(0.2)
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
        assert not watch.done()
        assert not await refused(installation.access("gateway"), address)


async def test_a_server_whose_certificate_expires(installation, tmp_path):
    """Connections go on, new ones fail; with new files new ones work again, and nothing was restarted."""
    tls, access = short_lived(installation, tmp_path / "short", "decode"), installation.access("gateway")
    async with Serving(tls) as address, access.channel(address, name=WORKER_NAME) as channel:
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(60):
            while not await refused(access, address):
                await asyncio.sleep(0.2)
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
        certificate, key = Authority.read(installation.folder).issue("decode", NAMES["decode"], 1)
        tls.cert.write_bytes(certificate)
        tls.key.write_bytes(key)
        assert not await refused(access, address)


# ---- files that cannot be used ----


def test_files_are_named(installation, stranger, tmp_path):
    good = installation.tls("decode")
    with pytest.raises(SettingsError, match=r"--tls-cert .*none.crt: No such file"):
        Tls(tmp_path / "none.crt", good.key, good.ca).check()
    with pytest.raises(SettingsError, match="KEY_VALUES_MISMATCH"):
        Tls(good.cert, stranger.tls("decode").key, good.ca).check()
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(SettingsError, match="--tls-ca"):
        Tls(good.cert, good.key, tmp_path / "text").check()
    good.check()


# ---- KV over gRPC ----


async def test_kv_streams_are_for_workers(installation, stranger):
    from baton.service.security.guard import Guard

    lines = []
    security = grpc_stream.Security(installation.tls("prefill").server(True), (Guard(None),))
    listener = await grpc_stream.listen("127.0.0.1", lines.append, security)
    address = f"127.0.0.1:{listener.port}"

    async def greet(access: Access) -> str:
        async with access.channel(address, name=WORKER_NAME) as channel:
            call = channel.stream_stream(f"/{grpc_stream.SERVICE}/{grpc_stream.METHOD}")(timeout=5)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code().name
        return "OK"

    try:
        for role, code in (("gateway", "PERMISSION_DENIED"), ("operator", "PERMISSION_DENIED")):
            assert await greet(installation.access(role)) == code
        assert await greet(Access()) == await greet(installation.access()) == "UNAVAILABLE"
        other = Access(installation.folder / "ca.crt", stranger.tls("decode").cert, stranger.tls("decode").key)
        assert await greet(other) == "UNAVAILABLE"
        assert not lines
        channel = installation.tls("decode").channel
        line = await grpc_stream.connect(address, grpc_stream.Security(channel=channel, server_name=WORKER_NAME))
        await line.send(kv_pb2.KVFrame(renew=kv_pb2.Renew()))  # until a first message has come no call is served
        while not lines:
            await asyncio.sleep(0.01)
        line.close()
        await line.ended.wait()
    finally:
        await listener.close()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00"], ids=["nothing", "half"])
async def test_who_does_not_shake_hands_with_kv_is_hung_up_on(installation, said, monkeypatch):
    soon = dict(grpc_stream._SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": 1000}
    monkeypatch.setattr(grpc_stream, "_SERVER_OPTIONS", tuple(soon.items()))
    security = grpc_stream.Security(installation.tls("prefill").server(True))
    listener = await grpc_stream.listen("127.0.0.1", lambda line: None, security)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(said)
    async with asyncio.timeout(40):  # 1 s, and a busy machine's
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    await listener.close()


def test_authority_signs_for_its_own_installation_alone(installation, stranger):
    certificate, _ = Authority.read(stranger.folder).issue("decode", NAMES["decode"], 1)
    (stranger.folder.parent / "one.crt").write_bytes(certificate)
    argv = ["openssl", "verify", "-CAfile", installation.folder / "ca.crt", stranger.folder.parent / "one.crt"]
    assert subprocess.run(argv, capture_output=True).returncode != 0
