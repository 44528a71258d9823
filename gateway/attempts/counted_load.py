"""The work of one attempt that is counted as recent load of the workers that were chosen for it."""

from baton.service.clock import now
from gateway.link.worker_link import WorkerLink


class CountedLoad:
    """Count the prefill and the decode of an attempt on one worker each, before the workers report them, since other
    requests choose workers meanwhile. Work is in seconds."""

    __slots__ = ("_prefill", "_decode")

    def __init__(self) -> None:
        self._prefill: tuple[WorkerLink, float] | None = None
        self._decode: tuple[WorkerLink, float] | None = None

    def count_prefill(self, link: WorkerLink, prefill_s: float) -> None:
        """Count the prefill as work of `link`, and of no other worker."""
        if self._prefill is None or self._prefill[0] is not link:
            self.drop_prefill()
            self._prefill = _counted(link, prefill_s)

    def count_decode(self, link: WorkerLink, decode_s: float) -> None:
        """Count the decode as work of `link`."""
        self._decode = _counted(link, decode_s)

    def drop_prefill(self) -> None:
        """Count the prefill as work of no worker: the one that was asked has refused."""
        self._prefill = _dropped(self._prefill)

    def drop(self) -> None:
        """Count nothing as work of any worker."""
        self.drop_prefill()
        self._decode = _dropped(self._decode)


def _counted(link: WorkerLink, seconds: float) -> tuple[WorkerLink, float]:
    link.recent_load.add(seconds, now())
    return link, seconds


def _dropped(counted: tuple[WorkerLink, float] | None) -> None:
    if counted is not None:
        link, seconds = counted
        link.recent_load.add(-seconds, now())
