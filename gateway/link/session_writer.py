"""The one task that writes the commands of a session."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)


def start_writer(
    call, outbox: "asyncio.Queue[pb.Command]", address: str, on_failure: Callable[[], None]
) -> asyncio.Task:
    """To be cancelled. A stream that has ended shows in its reader; for anything else that ends the writer
    `on_failure()` is called: a session in which nothing can be said any more is none."""
    return asyncio.create_task(_write(call, outbox, address, on_failure), name=f"session writer {address}")


async def _write(call, outbox, address, on_failure) -> None:
    try:
        while True:
            await call.write(await outbox.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
    except (Exception, asyncio.CancelledError):
        if asyncio.current_task().cancelling():
            raise
        log.exception("session writer failed %s", fields(address=address))
        on_failure()
