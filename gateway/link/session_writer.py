"""Write the commands of a session to its stream, in one task."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from baton.service.logs import fields
from baton.tasks import is_cancelled
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)


def start_writer(
    call, outbox: "asyncio.Queue[pb.Command]", address: str, on_failure: Callable[[], None]
) -> asyncio.Task:
    """Start a task that writes the commands of `outbox`, and return it; the caller cancels it.

    If the stream has ended, the task just ends, since the reader of the stream notices. If it ends for any other
    reason, it calls `on_failure()`, since nothing can be sent any more."""
    return asyncio.create_task(_write(call, outbox, address, on_failure), name=f"session writer {address}")


async def _write(call, outbox, address, on_failure) -> None:
    try:
        while True:
            await call.write(await outbox.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
    except (Exception, asyncio.CancelledError):
        if is_cancelled():
            raise
        log.exception("session writer failed %s", fields(address=address))
        on_failure()
