"""Describe one leg on this worker: its state, what it has still to get back, and the times that its spans are made
from."""

import asyncio
from dataclasses import dataclass
from enum import Enum

from baton.engine.core.request import DecodeReport, FirstToken, Key, PrefillDone, Request
from baton.worker.legs.states import LegState
from baton.worker.legs.token_record import TokenRecord
from baton.worker.wire.end_status import Status
from baton.worker.wire.outbox import Outbox
from kvtransfer.transfer.fetcher import FetchReport


class Owed(Enum):
    """Parts that hold something of a leg, and must give it back before the leg may end."""

    ENGINE = "engine"  # RequestEnded
    FETCH = "fetch"  # the task that lets bytes land here
    LEASE = "lease"  # the taker's


@dataclass(slots=True)
class LegTimes:
    """When a leg reached what its spans show, on time.monotonic()."""

    prefill_at: float | None = None  # this worker began to read the prompt, or its rest after a fetch
    fetch_at: float | None = None
    fetch_ended_at: float | None = None
    start_at: float | None = None  # Start came, or the local prefill was done
    kv_wait_s: float = 0.0  # from Start until the last KV was here


class Leg:
    """One leg. Used in the event loop only."""

    def __init__(self, key: Key, outbox: Outbox):
        self.key = key
        self.outbox = outbox  # of the session that opened it
        self.state = LegState.ABSENT
        self.owed: set[Owed] = set()
        self.status: Status | None = None
        self.is_stream_lost = False
        self.engine_key = key  # the engine keeps a leg's first key; an Attach gives it another `key`
        self.fingerprint = b""  # of its request
        self.record: TokenRecord | None = None  # once it decodes
        self.request: Request | None = None  # None for an Offer
        self.traceparent = ""  # W3C, of the gateway's span
        self.num_cached_tokens = 0  # cached here when it was admitted
        self.first_tokens: tuple[FirstToken, ...] = ()
        self.lease_id = b""
        self.ticket = b""  # the taker's ticket of that lease
        self.sources: list[tuple[bytes, bytes]] = []  # (handle, ticket) of prefixes on other workers, best first
        self.num_pulled_tokens = 0  # from other workers
        self.pull_failure: Status | None = None  # why the last source did not give all of its prefix
        self.num_matched_tokens: int | None = None  # for an Offer that is answered with NotHere
        self.fetching: asyncio.Task | None = None
        self.timer: asyncio.TimerHandle | None = None
        # for spans and reports
        self.times = LegTimes()
        self.prefill_done: PrefillDone | None = None
        self.fetch_report: FetchReport | None = None
        self.report: DecodeReport | None = None
        self.num_output_tokens = 0
