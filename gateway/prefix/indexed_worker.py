"""What a gateway knows of one worker in the index: its spans, its slot, and what is still to be written there."""

import itertools
from collections.abc import Callable, Mapping

from gateway.prefix.prefix_index import Change, Feed
from gateway.prefix.slot_leases import GIVE_UP_S

BATCH = 64  # writing 1,000 commands takes the event loop 20 ms, for which tokens and lookups would wait
NO_SLOT = "no slot is free"
_NEVER = float("-inf")


class IndexedWorker:
    """A worker that serves this gateway, or did until a moment ago. `at` is the present on any monotonic clock."""

    def __init__(self, worker: bytes, subscribe: Callable[[], None]):
        self.worker = worker
        self.feed = Feed(subscribe)
        self.is_ours = False  # this gateway writes its events
        self.slot: int | None = None
        self.is_given_up = False  # not all was written there: another slot is needed
        self.num_slots = 0  # how many it has had
        self.held_at = _NEVER  # when Redis last confirmed the slot
        self.pending: dict[bytes, bool] = {}  # span -> sealed; the slot has all else as the feed has it
        self.has_left_out = False  # evicted spans that are neither pending nor written
        self.refreshed_at = _NEVER
        self.left_at = _NEVER
        self.unwritten_for = ""  # why the last batch failed

    def begin(self, slot: int | None, at: float) -> None:
        """Begin to write into an empty slot."""
        self.slot, self.held_at, self.refreshed_at, self.pending = slot, at, _NEVER, {}
        self.is_given_up, self.has_left_out, self.num_slots = False, False, self.num_slots + 1
        self.unwritten_for = NO_SLOT if slot is None else ""

    def change(self, change: Change) -> None:
        """Have a change written."""
        if not self.has_left_out:
            self.pending.update(dict.fromkeys(change.evicted, False))
            self.pending.update(dict.fromkeys(change.sealed, True))

    def refresh(self, at: float) -> None:
        """Have all spans that the worker holds written again."""
        self.pending.update(dict.fromkeys(self.feed.spans, True))
        self.refreshed_at = at

    def put_back(self, unwritten: Mapping[bytes, bool]) -> None:
        """Have what was not written tried again. If that is far more than the worker holds, as nothing is ever written,
        one batch is tried again, and what is held goes into another slot once that succeeds."""
        self.pending = {**unwritten, **self.pending}
        if len(self.pending) > 2 * len(self.feed.spans) + BATCH:
            self.pending, self.has_left_out = dict(itertools.islice(self.pending.items(), BATCH)), True

    def may_write(self, at: float) -> bool:
        """Return whether the worker's slot may be written now. After a longer silence, other gateways retire the
        slot."""
        has_slot = self.slot is not None and not self.is_given_up
        return self.is_ours and has_slot and at - self.held_at < GIVE_UP_S
