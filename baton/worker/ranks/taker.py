"""Run the taker of one rank with a KV pool of its own. The worker's notes (fetches.py) say what it pulls."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from baton.service.fatal import exit_for_lost_device, exit_if_out_of_memory
from baton.worker.ranks.notes import PullOrder
from kvtransfer.errors import DeviceHangs, KVError, TransferCancelled, TransferFailed
from kvtransfer.layout import BlockRef
from kvtransfer.transfer.fetcher import Fetcher, FetchReport

log = logging.getLogger(__name__)


class _PreallocatedBlocks:
    """The blocks that the worker has set aside for a prompt whose layers keep no state."""

    def __init__(self, blocks: Sequence[BlockRef], num_cached_tokens: int, verified: Callable[[int], None]):
        self._blocks, self.num_cached_tokens, self._verified = blocks, num_cached_tokens, verified

    def set_aside(self, upto_token: int) -> Sequence[BlockRef]:
        return self._blocks

    def state_block(self) -> BlockRef:
        raise TransferFailed("states of sequences stay on one device")

    def verified(self, upto_token: int) -> None:
        self._verified(upto_token)

    async def caught_up(self) -> None:
        """Return without waiting: KV goes nowhere else."""


class RankTaker:
    """Run the fetches of one rank. Used in the event loop only."""

    def __init__(self, fetcher: Fetcher, send_note: Callable[[dict], None]):
        self._fetcher, self._send_note = fetcher, send_note
        self._fetching: dict[int, asyncio.Task[FetchReport]] = {}

    def handle_note(self, note: dict) -> None:
        """Begin a fetch, or cancel one."""
        name = note["fetch"]
        if "pull" in note:
            task = asyncio.get_running_loop().create_task(self._fetch(name, note["pull"]), name=f"fetch {name}")
            self._fetching[name] = task
            task.add_done_callback(partial(self._ended, name))
        elif (task := self._fetching.get(name)) is not None:
            task.cancel()

    async def stop(self) -> None:
        """Cancel all fetches."""
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fetcher.close()

    async def _fetch(self, name: int, order: PullOrder) -> FetchReport:
        blocks = [BlockRef(*block) for block in order["blocks"]]
        destination = _PreallocatedBlocks(
            blocks, order["num_cached_tokens"], lambda token: self._send_note({"fetch": name, "verified": token})
        )
        handle, ticket = bytes.fromhex(order["handle"]), bytes.fromhex(order["ticket"])
        return await self._fetcher.fetch(handle, ticket, destination, time.monotonic() + order["within_s"])

    def _ended(self, name: int, task: asyncio.Task[FetchReport]) -> None:
        del self._fetching[name]
        if task.cancelled():
            self._send_note({"fetch": name, "failed": [TransferCancelled.status, "given up"]})
        elif (error := task.exception()) is None:
            self._send_note({"fetch": name, "report": asdict(task.result())})
        else:
            self._send_note({"fetch": name, "failed": [_status_of(error), str(error)]})


def _status_of(error: BaseException) -> str:
    """Return the status of a failed fetch. Does not return if this process cannot go on."""
    if isinstance(error, DeviceHangs):
        exit_for_lost_device(str(error))
    if isinstance(error, KVError):
        return error.status
    log.error("a fetch failed", exc_info=error)
    exit_if_out_of_memory(error)
    return TransferFailed.status
