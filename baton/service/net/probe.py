"""`python -m baton.service.net.probe HOST:PORT` asks a process for its health, for health checks of containers.

Exits with 0 if it serves, 1 if it does not serve or answer, 2 for wrong use."""

import argparse
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.service.security.access import Access, add_access_flags, read_access
from baton.service.security.tls import WORKER_NAME
from baton.service.settings import SettingsError


def probe(target: str, service: str = "", timeout_s: float = 2.0, access: Access = Access()) -> str:
    """Return the serving status by name (SERVING, NOT_SERVING), or why there is none. Raises OSError for a certificate
    that cannot be read."""
    with access.channel(target, name=WORKER_NAME, blocking=True) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the generated types do not name its methods
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m baton.service.net.probe", description="ask a process for its health"
    )
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--service", default="", help="full name of a gRPC service (default: the process)")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS")
    add_access_flags(parser)
    args = parser.parse_args(argv)
    try:
        answer = probe(args.target, args.service, args.timeout, read_access(args))
    except SettingsError as error:
        parser.error(str(error))
    print(answer)
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
