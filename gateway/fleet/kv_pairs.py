"""Leave pairs of workers for a while of whose source no KV came to the taker: a firewall may be between them, or the source tells
a wrong address. Its breaker stays closed, for it has read the prompt, and as its lease ends soon it looks idle: it would draw in
request after request.

    good ─ a fetch fails ─► left ─ pause over ─► one request fetches ── its KV comes ─► good
                              ▲                       └ it fails ─┐
                              └───────── twice the pause ◄────────┘
"""

import logging
from collections.abc import Collection

from baton.service.clock import now
from baton.service.logs import fields
from gateway.link.worker_link import WorkerLink

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # a try costs one request the time of its fetch
_TRY_S = 30.0  # for a try to end: the prompt is read, and where packets are dropped some 13 s pass behind that

log = logging.getLogger(__name__)


class _LeftPair:
    """`since`: when it was left last; `until`: when it may be tried (both time.monotonic()); `is_tried`: it was, since then."""

    __slots__ = ("pause_s", "since", "until", "is_tried")

    def __init__(self) -> None:
        self.leave(_FIRST_PAUSE_S)

    def leave(self, pause_s: float) -> None:
        """Leave it for so long from now on."""
        self.pause_s, self.since, self.until, self.is_tried = pause_s, now(), now() + pause_s, False


class KVPairs:
    """The pairs that are left, each a source and a taker. Workers are named by their ids. Belongs to the event loop."""

    def __init__(self) -> None:
        self._left: dict[bytes, dict[bytes, _LeftPair]] = {}  # by the taker, then by the source

    @property
    def are_some_left(self) -> bool:
        """Return whether a failure of any pair has not been made good since."""
        return bool(self._left)

    def note_failure(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """No KV of `source` came to `taker`. Return False where that was the try of a pair that had been left."""
        sources = self._left.setdefault(taker.worker_id, {})
        if (pair := sources.get(source.worker_id)) is None:
            pair = sources[source.worker_id] = _LeftPair()
            _warn(source, taker, pair, why)
            return True
        if not pair.is_tried:
            return True
        pair.leave(min(2 * pair.pause_s, _LONGEST_PAUSE_S))
        _warn(source, taker, pair, why)
        return False

    def note_arrival(self, source: WorkerLink, taker: WorkerLink) -> None:
        """KV of `source` came to `taker`."""
        if self._drop(source.worker_id, taker.worker_id):
            log.info("KV comes again %s", fields(source=source.address, taker=taker.address))

    def note_fetch(self, source: WorkerLink, taker: WorkerLink, chosen_at: float) -> None:
        """KV of `source` is fetched by `taker`, chosen at `chosen_at` (time.monotonic()). Where they had been left before, no
        other request is sent to both until it has come or failed, or for as long as either may take."""
        pair = self._left.get(taker.worker_id, {}).get(source.worker_id)
        if pair is not None and chosen_at >= pair.since:
            pair.until, pair.is_tried = now() + max(pair.pause_s, _TRY_S), True

    def left_by(self, taker: bytes, at: float) -> Collection[bytes]:
        """Return the sources that are not paired with `taker` at this time."""
        if not (sources := self._left.get(taker)):
            return ()
        return [source for source, pair in sources.items() if at < pair.until]

    def forget(self, worker_id: bytes) -> None:
        """Forget the pairs of a worker that is gone."""
        self._left.pop(worker_id, None)
        for taker in [taker for taker, sources in self._left.items() if worker_id in sources]:
            self._drop(worker_id, taker)

    def _drop(self, source: bytes, taker: bytes) -> bool:
        """Return whether they were left."""
        sources = self._left.get(taker, {})
        was_left = sources.pop(source, None) is not None
        if was_left and not sources:
            del self._left[taker]
        return was_left


def _warn(source: WorkerLink, taker: WorkerLink, pair: _LeftPair, why: str) -> None:
    where = fields(source=source.address, taker=taker.address, for_s=pair.pause_s, why=why)
    log.warning("no KV comes from a worker, which is not paired with that taker %s", where)
