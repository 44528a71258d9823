"""Register a worker with gateways: where it can be dialled, repeated for as long as it serves."""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial

import grpc

from baton import tasks
from baton.service.logs import fields
from baton.service.net.client import open_channel
from baton.service.security.access import Access
from baton.service.security.tls import end_of
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc

CALL_S = 3.0
PAUSE_S = 2.0  # after a call that failed

log = logging.getLogger(__name__)


async def register(gateways: tuple[str, ...], request: pb.RegisterRequest, access: Access) -> None:
    """Register with all of `gateways` until cancelled. One that does not answer is asked again; why is logged, and
    whenever that changes."""
    async with asyncio.TaskGroup() as group:
        for address in gateways:
            tasks.start(f"registration {address}", partial(_with, address, request, access), group=group)


async def _with(address: str, request: pb.RegisterRequest, access: Access) -> None:
    last_why: str | None = None

    def note(why: str) -> None:
        """Log that it is registered, or `why` it is not, where that is news."""
        nonlocal last_why
        if why == last_why:
            return
        last_why = why
        state, write = ("not registered", log.warning) if why else ("registered", log.info)
        write("%s %s", state, fields(gateway=address, **{"why": why} if why else {}))

    while True:
        try:
            # Anew after a failure: a channel keeps the certificates that were there when it was opened.
            async with open_channel(address, access) as channel:
                stub = worker_pb2_grpc.RegistrationStub(channel)
                while True:
                    response = await stub.Register(request, timeout=CALL_S)
                    note("")
                    await asyncio.sleep(max(0.1, response.ttl_s / 3))
        except grpc.aio.AioRpcError as error:
            note(f"{error.code().name}: {error.details()}{_ended(access)}")
        except OSError as error:  # a certificate that is not there for a moment
            note(f"{error.filename}: {error.strerror}")
        await asyncio.sleep(PAUSE_S)


def _ended(access: Access) -> str:
    """Return what to say of this worker's certificate if it has ended: a gateway closes the connection, which does not
    say why."""
    if access.tls_cert is not None:
        with suppress(OSError, ValueError):
            if (end := end_of(access.tls_cert.read_bytes())) < time.time():
                return f"; {access.tls_cert} ended on {time.strftime('%Y-%m-%d', time.gmtime(end))}: renew it"
    return ""
