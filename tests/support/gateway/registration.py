"""Register workers with a gateway, and see which it uses."""

from baton.v1 import worker_pb2, worker_pb2_grpc


def register(c, address: str, role: str = "decode"):
    """Return the call by which a worker registers."""
    stub = worker_pb2_grpc.RegistrationStub(c.channel)
    return stub.Register(worker_pb2.RegisterRequest(address=address, role=role))


def serving_addresses(c) -> list[str]:
    """Return the addresses of the workers that serve."""
    return [link.address for link in c.gateway.registry.links if link.is_serving]
