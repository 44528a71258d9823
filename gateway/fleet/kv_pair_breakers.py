"""Circuit breakers for pairs of workers: one opens when KV of the source does not arrive at the taker.

A firewall may be between the two, or the source may advertise a wrong address. The source's own WorkerBreaker does not
open, since the source has read the prompt. As its leases end early it looks idle, and would attract all requests.

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
# The time within which a try ends: the prompt is read, and if packets are dropped a fetch fails after some 13 s.
_TRY_S = 30.0

log = logging.getLogger(__name__)


class _PairBreaker:
    """The open breaker of one pair. `since`: when it opened last; `until`: when the pair may be tried (both
    time.monotonic()); `is_tried`: the pair was tried since it opened."""

    __slots__ = ("pause_s", "since", "until", "is_tried")

    def __init__(self) -> None:
        self.open(_FIRST_PAUSE_S)

    def open(self, pause_s: float) -> None:
        """Let no request use the pair for `pause_s` from now on."""
        self.pause_s, self.since, self.until, self.is_tried = pause_s, now(), now() + pause_s, False


class KVPairBreakers:
    """The open breakers of pairs of a source and a taker; all other pairs are closed. Belongs to the event loop."""

    def __init__(self) -> None:
        self._open: dict[bytes, dict[bytes, _PairBreaker]] = {}  # id of the taker -> id of the source -> breaker

    @property
    def any_open(self) -> bool:
        """Return whether the breaker of any pair is open."""
        return bool(self._open)

    def note_fetch_started(self, source: WorkerLink, taker: WorkerLink, chosen_at: float) -> None:
        """Note that `taker` fetches KV from `source`; the two were chosen at `chosen_at` (time.monotonic()).

        If their breaker had opened before, no other request uses the pair until the KV has arrived or failed to, or for
        as long as that may take."""
        breaker = self._open.get(taker.worker_id, {}).get(source.worker_id)
        if breaker is not None and chosen_at >= breaker.since:
            breaker.until, breaker.is_tried = now() + max(breaker.pause_s, _TRY_S), True

    def note_fetch_failed(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """Note that no KV of `source` arrived at `taker`. Return False if this was the try of an open pair."""
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
        """Note that KV of `source` arrived at `taker`, which closes the pair's breaker."""
        if self._close(source.worker_id, taker.worker_id):
            log.info("KV comes again %s", fields(source=source.address, taker=taker.address))

    def open_for(self, taker: bytes, at: float) -> Collection[bytes]:
        """Return the ids of the sources from which `taker` is not to take KV at `at` (time.monotonic())."""
        if not (breakers := self._open.get(taker)):
            return ()
        return [source for source, breaker in breakers.items() if at < breaker.until]

    def forget(self, worker_id: bytes) -> None:
        """Forget the breakers of a worker that is gone."""
        self._open.pop(worker_id, None)
        for taker in [taker for taker, breakers in self._open.items() if worker_id in breakers]:
            self._close(worker_id, taker)

    def _close(self, source: bytes, taker: bytes) -> bool:
        """Close the breaker of a pair; return whether it was open."""
        breakers = self._open.get(taker, {})
        was_open = breakers.pop(source, None) is not None
        if was_open and not breakers:
            del self._open[taker]
        return was_open


def _warn(source: WorkerLink, taker: WorkerLink, breaker: _PairBreaker, why: str) -> None:
    where = fields(source=source.address, taker=taker.address, for_s=breaker.pause_s, why=why)
    log.warning("no KV comes from a worker, which is not paired with that taker %s", where)
