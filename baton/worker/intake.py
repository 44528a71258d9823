"""The taker's side: pulls the KV of an admitted key into blocks that the engine sets aside, and gives everything back.

    Fetch ─► fetcher.fetch ─ set_aside ─► bytes land ─ digest, epoch, generation, Confirm ─► verified ─► ... ─► Fetched
                 └─ on every exit: fetch_settled, so that a cancelled key's blocks may be used again
"""

import asyncio
import logging
from collections.abc import Callable

from baton.engine.engine import Engine
from baton.engine.request import Key
from baton.service.logs import fields
from baton.worker import endings
from baton.worker.endings import Status
from baton.worker.leg import Leg
from kvtransfer.errors import KVError, ProtocolError
from kvtransfer.fetcher import Fetcher, FetchReport
from kvtransfer.layout import BlockRef
from kvtransfer.wire import decode_handle

log = logging.getLogger(__name__)


class KeyEnded(Exception):
    """The engine has ended the key in the middle of its fetch; the reason comes with its RequestEnded."""


class EngineBlocks:
    """Where the fetcher may write: the blocks of one admitted key. Raises KeyEnded."""

    def __init__(self, engine: Engine, key: Key, num_cached_tokens: int):
        self.num_cached_tokens = num_cached_tokens
        self._engine = engine
        self._key = key

    def set_aside(self, upto_token: int) -> list[BlockRef]:
        try:
            return self._engine.set_aside(self._key, upto_token)
        except LookupError:
            raise KeyEnded from None

    def verified(self, upto_token: int) -> None:
        try:
            self._engine.verified(self._key, upto_token)
        except LookupError:
            raise KeyEnded from None


class Intake:
    """All fetches of one worker. Belongs to the event loop."""

    def __init__(self, engine: Engine, fetcher: Fetcher):
        self._engine = engine
        self._fetcher = fetcher

    def begin(
        self, leg: Leg, handle: bytes, ticket: bytes, on_end: Callable[[Leg, FetchReport | Status | None], None]
    ) -> None:
        """Starts a key's fetch; its deadline is the request's. `on_end` is called once, with nothing more to land.
        Raises KVError for a handle that is not this prompt's."""
        self._check(leg, handle)
        blocks = EngineBlocks(self._engine, leg.key, leg.num_cached_tokens)
        fetch = self._fetcher.fetch(handle, ticket, blocks, leg.request.deadline)
        leg.fetching = asyncio.get_running_loop().create_task(fetch, name=f"fetch {leg.key}")
        # A callback and not a `finally`: a task that is cancelled before its first step never enters its body.
        leg.fetching.add_done_callback(lambda task: self._ended(leg, task, on_end))

    def stop(self, leg: Leg) -> None:
        """`on_end` follows as soon as no byte can land any more. Idempotent."""
        leg.fetching.cancel()

    def _check(self, leg: Leg, data: bytes) -> None:
        """KV under another prompt's names would poison the cache."""
        handle = decode_handle(data)
        if handle.num_tokens > len(leg.request.token_ids):
            raise ProtocolError(f"the handle has {handle.num_tokens} tokens, the request {len(leg.request.token_ids)}")
        if handle.span_hashes != leg.request.span_hashes[: len(handle.span_hashes)]:
            raise ProtocolError("the handle is another prompt's: its span hashes are not the request's")

    def _ended(self, leg: Leg, task: asyncio.Task, on_end) -> None:
        self._engine.fetch_settled(leg.key)
        on_end(leg, self._outcome(leg, task))

    def _outcome(self, leg: Leg, task: asyncio.Task) -> FetchReport | Status | None:
        if task.cancelled():
            return endings.CANCELLED
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, KeyEnded):
            return None
        if not isinstance(error, (KVError, TimeoutError)):
            log.error("fetch failed %s", fields(key=leg.key), exc_info=error)
        return endings.of_exception(error)
