"""`python -m baton.cli.launch.together GATEWAY-OPTION ... -- WORKER-OPTION ...`: run a gateway and its one worker as
one process.

Each runs the code of its own process; their messages are handed over within the process."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from baton.lines import one_line
from baton.protocol import STAYS_AWAY
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.net.in_process import InProcessChannel, reachable_as
from baton.service.net.server import ListenError
from baton.service.settings import SettingsError
from baton.worker import main as worker_main
from baton.worker.settings import WorkerSettings
from decode_worker.role import ROLE
from gateway.__main__ import read_settings
from gateway.config.settings import GatewaySettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run both to their end, and return the worker's exit status. The gateway's options need not name workers."""
    given = list(sys.argv[1:] if argv is None else argv)
    border = given.index("--")
    try:
        settings = read_settings(given[:border])
    except SettingsError as error:
        return fail("gateway", one_line(error), WRONG_USE)
    return worker_main.main(ROLE, given[border + 1 :], partial(serve, settings))


async def serve(gateway: GatewaySettings, settings: WorkerSettings, role: str, table, stop: asyncio.Event) -> int:
    """Serve until `stop`, or until the worker is asked to drain; then drain the gateway first. Return the exit status.
    Raises as a worker does for a model or setting that it cannot serve."""
    gateway_is_over = asyncio.Event()
    with reachable_as(settings.listen) as channel:
        worker = asyncio.create_task(_serve_worker(settings, role, table, gateway_is_over, channel), name="worker")
        worker.add_done_callback(lambda _: stop.set())
        try:
            status = await _serve_gateway(replace(gateway, decode_workers=(settings.listen,)), stop)
            gateway_is_over.set()
            return status or await worker
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


async def _serve_worker(
    settings: WorkerSettings, role: str, table, stop: asyncio.Event, channel: InProcessChannel
) -> int:
    from baton.worker.app import running  # imports torch, as main has announced

    async with running(settings, role, table, stop) as worker:
        channel.serve(worker.service)
        await worker.drain_when(stop)
        return STAYS_AWAY if worker.stays_away else 0


async def _serve_gateway(settings: GatewaySettings, stop: asyncio.Event) -> int:
    from gateway.app import serve as serve_gateway

    try:
        return await serve_gateway(settings, stop)
    except SettingsError as error:
        return fail("gateway", one_line(error), WRONG_USE)
    except ListenError as error:
        return fail("gateway", one_line(error), FAILED)


if __name__ == "__main__":
    sys.exit(main())
