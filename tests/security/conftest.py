"""One installation's certificates and keys, made by `baton certs`, and a server of all our services behind the
guard."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from baton.cli.cluster.certs import Authority
from baton.service.net import server as grpc_server
from baton.service.security.access import Access
from baton.service.security.credentials import Credentials
from baton.service.security.guard import Guard
from baton.v1 import fleet_pb2_grpc, inference_pb2_grpc, worker_pb2_grpc
from tests.support.security.installation import Installation, install


@pytest.fixture(scope="session")
def installation(tmp_path_factory) -> Installation:
    return install(tmp_path_factory.mktemp("installation") / "certs", "--tenant", "acme")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory) -> Installation:
    """Another installation: the same roles, another authority."""
    return install(tmp_path_factory.mktemp("stranger") / "certs")


@pytest.fixture(scope="session")
def make_certificate(installation, tmp_path_factory):
    """`make_certificate(names, days=1)`: signed by the installation's authority, for these names."""

    def make(names, days: int = 1) -> Access:
        folder = tmp_path_factory.mktemp("certificate")
        certificate, key = Authority.read(installation.folder).issue("odd", names, days)
        (folder / "crt").write_bytes(certificate)
        (folder / "key").write_bytes(key)
        return Access(installation.folder / "ca.crt", folder / "crt", folder / "key")

    return make


class _Empty(grpc.GenericRpcHandler):
    """KV and ranks over gRPC, with nothing behind them."""

    def service(self, details):
        if details.method in ("/baton.kv.Raw/Pull", "/baton.rank.Raw/Join"):
            return grpc.stream_stream_rpc_method_handler(_pull)
        return None


async def _pull(requests, context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nothing here")


@dataclass(frozen=True)
class Guarded:
    """Ports of one server: `client` asks for no certificate, `fleet` does."""

    guard: Guard
    client: str
    fleet: str


@pytest.fixture
def guarded(installation):
    """`async with guarded() as ports`: every service that we have; what the guard lets through is UNIMPLEMENTED."""

    @contextlib.asynccontextmanager
    async def serve(credentials: Path | None = None):
        guard = Guard(Credentials(credentials or installation.folder / "credentials.toml"))
        server = grpc_server.make_server(interceptors=[guard])
        inference_pb2_grpc.add_InferenceServicer_to_server(inference_pb2_grpc.InferenceServicer(), server)
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet_pb2_grpc.FleetServicer(), server)
        fleet_pb2_grpc.add_LauncherServicer_to_server(fleet_pb2_grpc.LauncherServicer(), server)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker_pb2_grpc.WorkerServicer(), server)
        worker_pb2_grpc.add_RegistrationServicer_to_server(worker_pb2_grpc.RegistrationServicer(), server)
        server.add_generic_rpc_handlers((_Empty(),))
        grpc_server.enable_reflection(server, ["baton.v1.Inference"])
        health_pb2_grpc.add_HealthServicer_to_server(health_pb2_grpc.HealthServicer(), server)
        tls = installation.tls("gateway")
        ports = [grpc_server.bind(server, "127.0.0.1:0", tls.server(required)) for required in (False, True)]
        await server.start()
        try:
            yield Guarded(guard, *(f"localhost:{port}" for port in ports))
        finally:
            await server.stop(None)

    return serve
