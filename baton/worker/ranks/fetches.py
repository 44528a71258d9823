"""KV that comes to a worker each of whose ranks has its heads in memory of its own: every rank pulls what crosses its
part, all at the same time, and what all of them have verified is verified.

worker   {"fetch": id, "pull": {"handle", "ticket", "blocks", "num_cached_tokens", "within_s"}} ─► rank
worker   {"fetch": id, "stop": true}                                                           ─► rank     give it up
rank     {"fetch": id, "verified": token}                                                      ─► worker
rank     {"fetch": id, "report": FetchReport} or {"fetch": id, "failed": [status, message]}    ─► worker

After its report, or its failure, no byte of a fetch lands any more.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from baton import tasks
from baton.worker.ranks.notes import LocalStream, PullOrder
from kvtransfer.errors import PeerLost, of_status
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
    """What one other rank pulls, as its worker knows it. Belongs to the event loop."""

    def __init__(self, stream: LocalStream):
        self._stream = stream
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Queue[dict]] = {}
        self._is_gone = False

    def handle_note(self, note: dict) -> None:
        """Take what the rank says of a fetch."""
        if (answers := self._open.get(note["fetch"])) is not None:
            answers.put_nowait(note)

    def lose(self) -> None:
        """The rank is gone: no byte of it lands any more."""
        self._is_gone = True
        for answers in self._open.values():
            answers.put_nowait({"failed": [PeerLost.status, "a rank of this worker is gone"]})

    async def fetch(self, order: PullOrder, share: _Share) -> FetchReport:
        """Let the rank pull. Raises what it failed with, and what `share` raises; as a Fetcher, nothing lands then."""
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
                await tasks.await_despite_cancel(asyncio.create_task(_ended(answers)))  # bytes may land meanwhile
            raise
        finally:
            del self._open[name]
        if "failed" in heard:
            raise of_status(*heard["failed"])
        return FetchReport(**heard["report"])


class GroupFetcher:
    """A Fetcher of the first rank beside those of the others, as Intake uses one."""

    def __init__(self, own: Fetcher, others: Sequence[RankFetches]):
        self._own, self._others = own, others

    async def fetch(self, handle: bytes, ticket: bytes, destination: Destination, deadline: float) -> FetchReport:
        """As Fetcher.fetch. The blocks of the other ranks are set aside at once, not as they are announced."""
        cached, reports = destination.num_cached_tokens, []
        progress = CommonProgress(1 + len(self._others), cached, destination.verified)
        own, *others = (_Share(destination, partial(progress.note, rank)) for rank in range(1 + len(self._others)))
        order: PullOrder = {
            "handle": handle.hex(), "ticket": ticket.hex(), "num_cached_tokens": cached,
            "blocks": list(destination.set_aside(decode_handle(handle).num_tokens)),
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
