"""Leave pairs of workers for a while of whose source no KV came to the taker: a firewall may be between them, or the source tells
a wrong address. Its breaker stays closed, for it has read the prompt, and as its lease ends soon it looks idle: it would draw in
request after request.

    good ─ a fetch fails ─► left ─ pause over ─► one request tries it ─ its KV comes ─► good
                              ▲                       └ it fails ─┐
                              └───────── twice the pause ◄────────┘
"""

import logging
from collections.abc import Collection

from baton.service.clock import now
from baton.service.logs import fields
from gateway.link.worker_link import WorkerLink

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # a try costs one request the time of its fetch, some 13 s at most
_MAX_PAIRS = 4096  # workers come and go: the oldest are forgotten

log = logging.getLogger(__name__)


class _LeftPair:
    """`until`: when it may be tried (time.monotonic()); `is_tried`: a request has been sent there since."""

    __slots__ = ("pause_s", "until", "is_tried")

    def __init__(self) -> None:
        self.pause_s, self.until, self.is_tried = _FIRST_PAUSE_S, now() + _FIRST_PAUSE_S, False


class KVPairs:
    """The pairs that are left, each a source and a taker. Workers are named by their ids. Belongs to the event loop."""

    def __init__(self) -> None:
        self._left: dict[bytes, dict[bytes, _LeftPair]] = {}  # by the taker, then by the source

    @property
    def are_some_left(self) -> bool:
        """Return whether a failure of any pair has not been made good since."""
        return bool(self._left)

    def note_failure(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """No KV of `source` came to `taker`. Return whether that was asked for before they were left."""
        sources = self._left.setdefault(taker.worker_id, {})
        if (pair := sources.get(source.worker_id)) is None:
            pair, was_tried = _LeftPair(), False
            sources[source.worker_id] = pair
            self._forget_oldest()
        elif was_tried := pair.is_tried:
            pair.pause_s = min(2 * pair.pause_s, _LONGEST_PAUSE_S)
            pair.until, pair.is_tried = now() + pair.pause_s, False
        else:
            return True
        where = fields(source=source.address, taker=taker.address, for_s=pair.pause_s, why=why)
        log.warning("no KV comes from a worker, which is not paired with that taker %s", where)
        return not was_tried

    def note_arrival(self, source: WorkerLink, taker: WorkerLink) -> None:
        """KV of `source` came to `taker`."""
        if (sources := self._left.get(taker.worker_id)) and sources.pop(source.worker_id, None):
            log.info("KV comes again %s", fields(source=source.address, taker=taker.address))
            if not sources:
                del self._left[taker.worker_id]

    def note_try(self, source: WorkerLink, taker: WorkerLink) -> None:
        """A request is sent to both. Where they were left no other one is until that has come to its end, or for a pause."""
        if (sources := self._left.get(taker.worker_id)) and (pair := sources.get(source.worker_id)):
            pair.until, pair.is_tried = now() + pair.pause_s, True

    def left_by(self, taker: bytes, at: float) -> Collection[bytes]:
        """Return the sources that are not paired with `taker` at this time."""
        if not (sources := self._left.get(taker)):
            return ()
        return [source for source, pair in sources.items() if at < pair.until]

    def _forget_oldest(self) -> None:
        while sum(map(len, self._left.values())) > _MAX_PAIRS:
            del self._left[next(iter(self._left))]
