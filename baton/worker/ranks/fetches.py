"""Pull KV for a worker whose ranks each keep their part in a pool of their own: all ranks pull their parts at the same
time, and tokens count as verified when all ranks have verified them.

worker   {"fetch": id, "pull": {"handle", "ticket", "blocks", "num_cached_tokens", "within_s"}} ─► rank
worker   {"fetch": id, "stop": true}                                                           ─► rank     cancel
rank     {"fetch": id, "verified": token}                                                      ─► worker
rank     {"fetch": id, "report": FetchReport} or {"fetch": id, "failed": [status, message]}    ─► worker

After its report or failure, no more bytes of a fetch land.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from baton import tasks
from baton.worker.ranks.notes import LocalStream, PullOrder
from kvtransfer.errors import PeerLost, error_of
from kvtransfer.layout import BlockRef
from kvtransfer.transfer.destination import CommonProgress, Destination
from kvtransfer.transfer.dialogue import together
from kvtransfer.transfer.fetcher import Fetcher, FetchReport
from kvtransfer.wire import decode_handle


class _Share:
    """The destination of one rank's part of a fetch."""

    def __init__(self, whole: Destination, verified: Callable[[int], None]):
        self._whole, self._verified = whole, verified
        self.num_cached_tokens = whole.num_cached_tokens

    def set_aside(self, upto_token: int) -> Sequence[BlockRef]:
        return self._whole.set_aside(upto_token)

    def state_block(self) -> BlockRef:
        return self._whole.state_block()

    def verified(self, upto_token: int) -> None:
        self._verified(upto_token)

    async def caught_up(self) -> None:
        await self._whole.caught_up()


class RankFetches:
    """Run the fetches of another rank, from the worker's side. Used in the event loop only."""

    def __init__(self, stream: LocalStream):
        self._stream = stream
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Queue[dict]] = {}
        self._is_gone = False

    def handle_note(self, note: dict) -> None:
        """Handle a note of the rank about a fetch."""
        if (answers := self._open.get(note["fetch"])) is not None:
            answers.put_nowait(note)

    def lose(self) -> None:
        """Fail all fetches: the rank is gone, and no more of its bytes land."""
        self._is_gone = True
        for answers in self._open.values():
            answers.put_nowait({"failed": [PeerLost.status, "a rank of this worker is gone"]})

    async def fetch(self, order: PullOrder, share: _Share) -> FetchReport:
        """Let the rank pull. Raises the rank's error, and what `share` raises; no bytes land after that, as with
        Fetcher."""
        if self._is_gone:
            raise PeerLost("a rank of this worker is gone")
        name, answers = next(self._ids), asyncio.Queue()
        self._open[name] = answers
        self._stream.send_note({"fetch": name, "pull": order})
        try:
            while "verified" in (heard := await answers.get()):
                share.verified(heard["verified"])
        except BaseException:
            self._stream.send_note({"fetch": name, "stop": True})
            with suppress(asyncio.CancelledError):  # the first error counts
                await tasks.await_despite_cancel(asyncio.create_task(_ended(answers)))  # bytes may land until then
            raise
        finally:
            del self._open[name]
        if "failed" in heard:
            raise error_of(*heard["failed"])
        return FetchReport(**heard["report"])


class RankedFetcher:
    """Pull with the first rank's Fetcher and those of the other ranks at the same time."""

    def __init__(self, own: Fetcher, others: Sequence[RankFetches]):
        self._own, self._others = own, others

    async def fetch(self, handle: bytes, ticket: bytes, destination: Destination, deadline: float) -> FetchReport:
        """Pull as Fetcher.fetch does. All blocks are set aside at the beginning, because the other ranks need their
        ids."""
        cached, reports = destination.num_cached_tokens, []
        progress = CommonProgress(1 + len(self._others), cached, destination.verified)
        own, *others = (_Share(destination, partial(progress.note, rank)) for rank in range(1 + len(self._others)))
        order: PullOrder = {
            "handle": handle.hex(), "ticket": ticket.hex(), "num_cached_tokens": cached,
            "blocks": list(destination.set_aside(decode_handle(handle).prompt.num_tokens)),
            "within_s": deadline - time.monotonic(),
        }  # fmt: skip

        async def add_report(pull: Callable[[], Awaitable[FetchReport]]) -> None:
            reports.append(await pull())

        pulls = [partial(self._own.fetch, handle, ticket, own, deadline)]
        pulls += [partial(rank.fetch, order, share) for rank, share in zip(self._others, others, strict=True)]
        await together([add_report(pull) for pull in pulls])
        return FetchReport.merged(reports)


async def _ended(answers: asyncio.Queue[dict]) -> None:
    while "verified" in await answers.get():
        pass
