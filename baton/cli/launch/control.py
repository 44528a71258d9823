"""The launcher of a running `baton up` as a gRPC service for operators, and its client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from baton.cli.launch.placing.launcher import MAX_WORKERS, LaunchError, PlacedWorker, WorkerLauncher
from baton.cli.launch.placing.ports import PortError
from baton.protocol import ROLES
from baton.service.errors import FailedPrecondition, InvalidRequest, Overloaded
from baton.service.net.client import explain_failure, open_channel
from baton.service.net.server import bind, make_server
from baton.service.security.access import Access
from baton.service.security.guard import Guard
from baton.service.security.tls import Tls
from baton.v1 import fleet_pb2 as pb
from baton.v1 import fleet_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50050"
_CALL_S = 10.0
_STOP_S = 0.5


class ControlServer:
    """Serves a launcher at an address: to operators if there are certificates, else to everyone on this host."""

    def __init__(self, launcher: WorkerLauncher, tls: Tls | None):
        self._tls = tls
        self._server = make_server(interceptors=[Guard(is_open=tls is None)])
        fleet_pb2_grpc.add_LauncherServicer_to_server(_LauncherService(launcher), self._server)

    async def start(self, address: str) -> int:
        """Listen, and return the port. Raises ListenError."""
        port = bind(self._server, address, self._tls and self._tls.server(require_certificate=True))
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(_STOP_S)


class _LauncherService(fleet_pb2_grpc.LauncherServicer):
    def __init__(self, launcher: WorkerLauncher):
        self._launcher = launcher

    async def StartWorkers(self, request: pb.StartWorkersRequest, context) -> pb.StartWorkersResponse:
        try:
            if request.role not in ROLES:
                raise InvalidRequest("role", f"{request.role!r} is neither prefill nor decode")
            if not request.number:
                raise InvalidRequest("number", "at least 1")
            if request.number + len(await self._launcher.list()) > MAX_WORKERS:
                raise Overloaded(f"at most {MAX_WORKERS} workers", 60.0, reason="TOO_MANY_WORKERS")
            await self._launcher.start(request.role, request.number)
        except (LaunchError, PortError) as error:
            raise FailedPrecondition(str(error)) from None
        return pb.StartWorkersResponse()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context) -> pb.DrainWorkerResponse:
        try:
            await self._launcher.drain(request.name)
        except LaunchError as error:
            raise FailedPrecondition(str(error)) from None
        return pb.DrainWorkerResponse()

    async def WatchWorkers(self, request: pb.WatchWorkersRequest, context) -> AsyncIterator[pb.WatchWorkersResponse]:
        async for workers in self._launcher.watch():
            yield pb.WatchWorkersResponse(workers=[_message(worker) for worker in workers])


class RemoteLauncher:
    """The launcher of the `baton up` whose control port is `target`."""

    keeps_roles = False

    def __init__(self, target: str, access: Access):
        self._target, self._access = target, access

    async def start(self, role: str, number: int) -> None:
        await self._call("StartWorkers", pb.StartWorkersRequest(role=role, number=number))

    async def drain(self, name: str) -> None:
        await self._call("DrainWorker", pb.DrainWorkerRequest(name=name))

    async def list(self) -> list[PlacedWorker]:
        async for workers in self.watch():
            return workers
        raise LaunchError(f"{self._target}: ended before it said which workers there are")

    async def watch(self) -> AsyncIterator[list[PlacedWorker]]:
        try:
            async with open_channel(self._target, self._access) as channel:
                async for message in fleet_pb2_grpc.LauncherStub(channel).WatchWorkers(pb.WatchWorkersRequest()):
                    yield [_worker(each) for each in message.workers]
        except grpc.aio.AioRpcError as error:
            raise self._launch_error(error) from None

    async def _call(self, name: str, request) -> None:
        try:
            async with open_channel(self._target, self._access) as channel:
                await getattr(fleet_pb2_grpc.LauncherStub(channel), name)(request, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            raise self._launch_error(error) from None

    def _launch_error(self, error: grpc.aio.AioRpcError) -> LaunchError:
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            return LaunchError(error.details() or error.code().name)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return LaunchError(f"{self._target} is no launcher: give what `baton up` calls control=")
        return LaunchError(explain_failure(self._target, error.code(), error.details(), self._access))


def _message(worker: PlacedWorker) -> pb.PlacedWorker:
    fields = worker._asdict()
    del fields["exit_status"]
    return pb.PlacedWorker(**fields)


def _worker(message: pb.PlacedWorker) -> PlacedWorker:
    fields = {each.name: getattr(message, each.name) for each in pb.PlacedWorker.DESCRIPTOR.fields}
    return PlacedWorker(**fields)
