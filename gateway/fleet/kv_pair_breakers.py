"""A circuit breaker for each pair of workers of whose source no KV came to the taker: a firewall may be between them,
or the source tells a wrong address. The source's own breaker stays closed, for it has read the prompt, and as its lease
ends soon it looks idle: it would draw in request after request.

    closed ─ a fetch fails ─► open ─ pause over ─► one request fetches ── its KV comes ─► closed
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


class _PairBreaker:
    """One that is open. `since`: when it opened last; `until`: when the pair may be tried (both time.monotonic());
    `is_tried`: it was, since then."""

    __slots__ = ("pause_s", "since", "until", "is_tried")

    def __init__(self) -> None:
        self.open(_FIRST_PAUSE_S)

    def open(self, pause_s: float) -> None:
        """Let no request use the pair for so long from now on."""
        self.pause_s, self.since, self.until, self.is_tried = pause_s, now(), now() + pause_s, False


class KVPairBreakers:
    """The breakers of all pairs, each a source and a taker; a pair without one is as good as one whose breaker is
    closed. Workers are named by their ids. Belongs to the event loop."""

    def __init__(self) -> None:
        self._open: dict[bytes, dict[bytes, _PairBreaker]] = {}  # by the taker, then by the source

    @property
    def any_open(self) -> bool:
        """Return whether a failure of any pair has not been made good since."""
        return bool(self._open)

    def note_fetch_started(self, source: WorkerLink, taker: WorkerLink, chosen_at: float) -> None:
        """KV of `source` is fetched by `taker`, chosen at `chosen_at` (time.monotonic()). Where their breaker had
        opened before, no other request is sent to both until it has come or failed, or for as long as either may
        take."""
        breaker = self._open.get(taker.worker_id, {}).get(source.worker_id)
        if breaker is not None and chosen_at >= breaker.since:
            breaker.until, breaker.is_tried = now() + max(breaker.pause_s, _TRY_S), True

    def note_fetch_failed(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """No KV of `source` came to `taker`. Return False where that was the try of a pair whose breaker was open."""
        breakers = self._open.setdefault(taker.worker_id, {})
        if (breaker := breakers.get(source.worker_id)) is None:
            breaker = breakers[source.worker_id] = _PairBreaker()
            _warn(source, taker, breaker, why)
            return True
        if not breaker.is_tried:
            return True
        breaker.open(min(2 * breaker.pause_s, _LONGEST_PAUSE_S))
        _warn(source, taker, breaker, why)
        return False

    def note_fetch_done(self, source: WorkerLink, taker: WorkerLink) -> None:
        """KV of `source` came to `taker`."""
        if self._close(source.worker_id, taker.worker_id):
            log.info("KV comes again %s", fields(source=source.address, taker=taker.address))

    def open_for(self, taker: bytes, at: float) -> Collection[bytes]:
        """Return the sources that are not paired with `taker` at this time."""
        if not (breakers := self._open.get(taker)):
            return ()
        return [source for source, breaker in breakers.items() if at < breaker.until]

    def forget(self, worker_id: bytes) -> None:
        """Forget the pairs of a worker that is gone."""
        self._open.pop(worker_id, None)
        for taker in [taker for taker, breakers in self._open.items() if worker_id in breakers]:
            self._close(worker_id, taker)

    def _close(self, source: bytes, taker: bytes) -> bool:
        """Return whether it was open."""
        breakers = self._open.get(taker, {})
        was_open = breakers.pop(source, None) is not None
        if was_open and not breakers:
            del self._open[taker]
        return was_open


def _warn(source: WorkerLink, taker: WorkerLink, breaker: _PairBreaker, why: str) -> None:
    where = fields(source=source.address, taker=taker.address, for_s=breaker.pause_s, why=why)
    log.warning("no KV comes from a worker, which is not paired with that taker %s", where)
