"""Register a worker with gateways: tell them its address, again and again while it serves."""

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
    """Register with all of `gateways` until cancelled. A gateway that does not answer is tried again; the reason is
    logged when it changes."""
    async with asyncio.TaskGroup() as group:
        for address in gateways:
            tasks.start(f"registration {address}", partial(_with, address, request, access), group=group)


async def _with(address: str, request: pb.RegisterRequest, access: Access) -> None:
    last_why: str | None = None

    def note(why: str) -> None:
        """Log that the worker is registered, or `why` it is not, if that has changed."""
        nonlocal last_why
        if why == last_why:
            return
        last_why = why
        state, write = ("not registered", log.warning) if why else ("registered", log.info)
        write("%s %s", state, fields(gateway=address, **{"why": why} if why else {}))

    while True:
        try:
            # Opened again after a failure, since a channel keeps the certificates that it was opened with.
            async with open_channel(address, access) as channel:
                stub = worker_pb2_grpc.RegistrationStub(channel)
                while True:
                    response = await stub.Register(request, timeout=CALL_S)
                    note("")
                    await asyncio.sleep(max(0.1, response.ttl_s / 3))
        except grpc.aio.AioRpcError as error:
            note(f"{error.code().name}: {error.details()}{_ended(access)}")
        except OSError as error:  # a certificate may be missing while it is replaced
            note(f"{error.filename}: {error.strerror}")
        await asyncio.sleep(PAUSE_S)


def _ended(access: Access) -> str:
    """Return a remark if this worker's certificate has expired: the gateway then closes the connection without a
    reason."""
    if access.tls_cert is not None:
        with suppress(OSError, ValueError):
            if (end := end_of(access.tls_cert.read_bytes())) < time.time():
                return f"; {access.tls_cert} ended on {time.strftime('%Y-%m-%d', time.gmtime(end))}: renew it"
    return ""
