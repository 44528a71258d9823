"""Workers that have said themselves where they are: to this gateway, or by way of Redis to another one."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import grpc

from baton.service.errors import BatonError, InvalidRequest, Overloaded, abort
from baton.service.server import ListenError, split_address
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from gateway.members import Members
from gateway.roster import Roster
from gateway.timing import now

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Registration"].full_name
TTL_S = 10.0
_LOOK_S = 1.0
MAX_WORKERS = 4096


class Registered:
    """`members` by role. A worker is (role, address)."""

    def __init__(self, members: Mapping[str, Members], roster: Roster):
        self._members, self._roster = members, roster
        self._until: dict[tuple[str, str], float] = {}
        self._told = asyncio.Event()

    def note(self, role: str, address: str) -> None:
        """It is there for the next TTL_S. Raises InvalidRequest, Overloaded."""
        if role not in self._members:
            raise InvalidRequest("role", f"{role!r} is neither prefill nor decode")
        try:
            _, port = split_address(address)
        except ListenError as error:
            raise InvalidRequest("address", str(error)) from None
        if not port:
            raise InvalidRequest("address", "port 0 cannot be dialled")
        if len(self._until) >= MAX_WORKERS and (role, address) not in self._until:
            raise Overloaded(f"{MAX_WORKERS} workers are registered here already", TTL_S, reason="TOO_MANY_WORKERS")
        is_new = (role, address) not in self._until
        self._until[role, address] = now() + TTL_S
        if is_new:
            self._told.set()

    async def follow(self, group: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        """Keeps a session with each of them, in tasks of `group`; until cancelled."""
        try:
            # Not for ever: a roster in Redis may swallow the cancellation.
            while not asyncio.current_task().cancelling():
                await self._look(group)
                on_change()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._told.wait()
                self._told.clear()
        finally:
            await self._roster.close()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        at = now()
        self._until = {worker: until for worker, until in self._until.items() if until > at}
        here = {worker: until - at for worker, until in self._until.items()}
        known = here.keys() | await self._roster.exchange(here)
        for role, members in self._members.items():
            members.keep([address for its_role, address in sorted(known) if its_role == role], group)


class RegistrationService(worker_pb2_grpc.RegistrationServicer):
    """The worker's call, again within every ttl_s."""

    def __init__(self, registered: Registered):
        self._registered = registered

    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext):  # noqa: N802
        try:
            self._registered.note(request.role, request.address)
        except BatonError as error:
            await abort(context, error)
        return pb.RegisterResponse(ttl_s=TTL_S)
