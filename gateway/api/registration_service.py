"""Serve baton.v1.Registration, by which workers announce their addresses."""

import grpc

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from gateway.discovery.registration import TTL_S, Registrations


class RegistrationService(worker_pb2_grpc.RegistrationServicer):
    """The call that a worker repeats before `ttl_s` seconds have passed."""

    def __init__(self, registrations: Registrations):
        self._registrations = registrations

    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext) -> pb.RegisterResponse:
        """Keep the worker's address for TTL_S. Raises InvalidRequest, Overloaded."""
        await self._registrations.note(request.role, request.address)
        return pb.RegisterResponse(ttl_s=TTL_S)
