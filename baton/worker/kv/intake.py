"""Pull the KV of an admitted leg into blocks that the engine sets aside: the taker's side.

Fetch ─► fetcher.fetch ─ set_aside ─► bytes land ─ digest, epoch, generation, Confirm ─► verified ─► ... ─► Fetched
             └─ on every exit: fetch_settled, after which a cancelled leg's blocks may be used again
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from baton.engine.core.request import Key, Refusal
from baton.engine.engine import Engine
from baton.service.fatal import exit_for_lost_device, exit_if_out_of_memory
from baton.service.logs import fields
from baton.worker.legs.leg import Leg
from baton.worker.wire import end_status
from baton.worker.wire.end_status import Status
from kvtransfer.compatible import MIXED
from kvtransfer.errors import DeviceHangs, KVError, PeerLost, ProtocolError
from kvtransfer.layout import BlockRef, KVHandle
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.destination import Destination
from kvtransfer.transfer.fetcher import FetchReport
from kvtransfer.wire import decode_handle

log = logging.getLogger(__name__)

SILENCE_S = 1.0  # a prefix whose source is silent for so long is given up: waiting longer costs more than it saves
_MAX_LOGGED = 256  # remembered log lines, since sources come and go with their workers


class KeyEnded(Exception):
    """The engine has ended the leg during its fetch; its RequestEnded has the reason."""


class EngineBlocks:
    """Give the fetcher the blocks of one leg to write. `on_verified(token)`: everything below is verified and does not
    change. `on_progress()`: a range was announced, has landed, or is verified. Methods raise KeyEnded."""

    def __init__(
        self,
        engine: Engine,
        key: Key,
        num_cached_tokens: int,
        on_verified: Callable[[int], None],
        on_progress: Callable[[], None] = lambda: None,
    ):
        self.num_cached_tokens = num_cached_tokens
        self._engine = engine
        self._key = key
        self._on_verified, self._on_progress = on_verified, on_progress
        self._refs: list[BlockRef] = []

    def set_aside(self, upto_token: int) -> list[BlockRef]:
        """Return the blocks below `upto_token`. Only new blocks are requested from the engine, and the last known one
        again, which must be unchanged."""
        self._on_progress()
        if self._engine.layout.num_blocks(upto_token) > len(self._refs):
            first = max(0, len(self._refs) - 1)
            try:
                self._refs[first:] = self._engine.admission.set_aside(self._key, upto_token, first)
            except LookupError:
                raise KeyEnded from None
        return self._refs

    def state_block(self) -> BlockRef:
        try:
            (block,) = self._engine.admission.state_blocks(self._key)
        except LookupError:
            raise KeyEnded from None
        return block

    def verified(self, upto_token: int) -> None:
        self._on_progress()
        try:
            num_computed = self._engine.admission.verify(self._key, upto_token)
        except LookupError:
            raise KeyEnded from None
        self._on_verified(num_computed)

    async def caught_up(self) -> None:
        """Return without waiting: all readers use this pool."""
        self._on_progress()


class KVFetcher(Protocol):
    """The fetcher that Intake uses: kvtransfer's Fetcher, or RankedFetcher or RelayingFetcher for a worker whose ranks
    have pools of their own."""

    async def fetch(self, handle: bytes, ticket: bytes, destination: Destination, deadline: float) -> FetchReport: ...


class Intake:
    """Run the fetches of one worker. Called in the event loop."""

    def __init__(self, engine: Engine, fetcher: KVFetcher):
        self._engine = engine
        self._fetcher = fetcher
        self._fetching: set[asyncio.Task] = set()
        self._logged: dict[tuple[bytes, str], None] = {}  # log lines about sources, the latest _MAX_LOGGED

    @property
    def num_fetches(self) -> int:
        """Return the number of fetches whose bytes may still be written to the pool."""
        return len(self._fetching)

    def begin(
        self, leg: Leg, handle: bytes, ticket: bytes, on_end: Callable[[Leg, FetchReport | Status | None], None]
    ) -> None:
        """Start a leg's fetch, with the request's deadline. `on_end` is called once, when no more bytes can land.
        Raises KVError for a handle of another prompt."""

        def arrived(upto_token: int) -> None:
            leg.num_pulled_tokens = max(0, upto_token - leg.num_cached_tokens)

        self._fetch(leg, self._check(leg, handle), handle, ticket, on_end, arrived, asyncio.timeout(None))

    def begin_prefix(
        self, leg: Leg, on_end: Callable[[Leg, FetchReport | Status | None], None], on_verified: Callable[[int], None]
    ) -> bool:
        """Start to fetch whole spans of a prompt that will be prefilled here, from the first usable one of its sources.
        Return False if there is none, or the engine has ended the leg."""
        while leg.sources:
            handle, ticket = leg.sources.pop(0)
            try:
                self._begin_prefix(leg, handle, ticket, on_end, on_verified)
                return True
            except KVError as error:
                log.info("prefix not pulled %s", fields(key=leg.key, reason=error))
            except LookupError:
                break
        return False

    def _begin_prefix(self, leg: Leg, handle: bytes, ticket: bytes, on_end, on_verified) -> None:
        """Fetch from one source. Verified tokens count as cached, for the next source too."""
        decoded = self._check(leg, handle)
        num_tokens = decoded.prompt.num_tokens
        if num_tokens % SPAN_TOKENS or num_tokens >= len(leg.request.token_ids):
            raise ProtocolError(f"{num_tokens} tokens are no prefix of whole spans with something left to compute")

        def arrived(upto_token: int) -> None:
            leg.num_pulled_tokens += upto_token - leg.num_cached_tokens
            leg.num_cached_tokens = upto_token
            on_verified(upto_token)

        self._engine.admission.begin_fetch(leg.key)
        self._fetch(leg, decoded, handle, ticket, on_end, arrived, asyncio.timeout(SILENCE_S))

    def stop(self, leg: Leg) -> None:
        """Cancel a fetch; `on_end` follows when no more bytes can land. Idempotent."""
        leg.fetching.cancel()

    def _fetch(
        self, leg: Leg, decoded: KVHandle, handle: bytes, ticket: bytes, on_end, on_verified, silence: asyncio.Timeout
    ) -> None:
        """Start the fetch; `silence` ends it early, though the request has time left."""
        skipped = self._engine.admission.skip(leg.key, decoded.prompt.num_tokens)
        begin = max(skipped, leg.num_cached_tokens) // SPAN_TOKENS * SPAN_TOKENS
        blocks = EngineBlocks(
            self._engine, leg.key, min(begin, decoded.prompt.num_tokens), on_verified, partial(_restart, silence)
        )
        fetch = partial(self._fetcher.fetch, handle, ticket, blocks, leg.request.deadline)
        leg.fetching = asyncio.create_task(_unless_silent(fetch, silence), name=f"fetch {leg.key}")
        self._fetching.add(leg.fetching)
        # A callback, not a `finally`: a task that is cancelled before its first step never enters its body.
        leg.fetching.add_done_callback(lambda task: self._ended(leg, task, decoded.source_instance, on_end))

    def _check(self, leg: Leg, data: bytes) -> KVHandle:
        """Return the decoded handle. Raises ProtocolError for another prompt's handle, whose KV would poison the
        cache."""
        handle = decode_handle(data)
        prompt = handle.prompt
        if prompt.num_tokens > len(leg.request.token_ids):
            raise ProtocolError(f"the handle has {prompt.num_tokens} tokens, the request {len(leg.request.token_ids)}")
        if prompt.span_hashes != leg.request.span_hashes[: len(prompt.span_hashes)]:
            raise ProtocolError("the handle is another prompt's: its span hashes are not the request's")
        return handle

    def _ended(self, leg: Leg, task: asyncio.Task, source: bytes, on_end) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), DeviceHangs):
            exit_for_lost_device(str(error))  # before the blocks, which may still be written, can be reused
        self._fetching.discard(task)
        self._engine.admission.fetch_settled(leg.key)
        outcome = self._outcome(leg, task)
        if isinstance(outcome, FetchReport):
            self._log_new(source, outcome)
        on_end(leg, outcome)

    def _log_new(self, source: bytes, report: FetchReport) -> None:
        """Log each source's transports and numerics class once, since they are the same for every request."""
        self._log_once(source, report.transport, "KV is pulled by " + report.reason)
        if report.numerics == MIXED:
            self._log_once(source, MIXED, "KV of another numerics class is taken: mixed")

    def _log_once(self, source: bytes, about: str, words: str) -> None:
        if (source, about) in self._logged:
            return
        log.info("%s %s", words, fields(source=source.hex()[:8]))
        self._logged[source, about] = None
        if len(self._logged) > _MAX_LOGGED:
            del self._logged[next(iter(self._logged))]

    def _outcome(self, leg: Leg, task: asyncio.Task) -> FetchReport | Status | None:
        if task.cancelled():
            return end_status.CANCELLED
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, KeyEnded):
            return None
        if not isinstance(error, (KVError, TimeoutError, Refusal)):
            log.error("fetch failed %s", fields(key=leg.key), exc_info=error)
            exit_if_out_of_memory(error)
            return end_status.internal(error)  # no client can have caused it
        return end_status.of_exception(error)


def _restart(silence: asyncio.Timeout) -> None:
    """Restart the timeout, because something has come."""
    if silence.when() is not None and not silence.expired():
        silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)


async def _unless_silent(fetch: Callable[[], Awaitable[FetchReport]], silence: asyncio.Timeout) -> FetchReport:
    """Return the result of `fetch`. Raises PeerLost if `silence` runs out first."""
    try:
        async with silence:
            return await fetch()
    except TimeoutError as error:
        if not silence.expired():
            raise
        raise PeerLost(f"nothing came for {SILENCE_S:g} s") from error
