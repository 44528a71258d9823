"""All methods that our ports serve."""

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.v1 import fleet_pb2, inference_pb2, kv_pb2, worker_pb2
from baton.worker.ranks import stream as ranks
from kvtransfer.transports import grpc_stream

FILES = (inference_pb2, fleet_pb2, worker_pb2, kv_pb2, health_pb2, reflection_pb2)


def methods() -> dict[str, object]:
    """Return every method that any of our processes can serve, by its path; None: it has no descriptor."""
    found = {f"/{grpc_stream.SERVICE}/{grpc_stream.METHOD}": None, ranks.PATH: None}
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            found |= {f"/{service.full_name}/{method.name}": method for method in service.methods}
    return found
