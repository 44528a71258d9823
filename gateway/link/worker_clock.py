"""Measure how far a worker's clock is from this one: beats go out, and the worker's reports of load answer them."""

from baton.service.clock import ClockComparison, Offset, now
from baton.service.observe.telemetry import CLOCK
from baton.v1 import worker_pb2 as pb


class WorkerClock:
    """The clock of one worker, as one session measures it."""

    def __init__(self) -> None:
        self._comparison = ClockComparison()

    @property
    def offset(self) -> Offset | None:
        """How far the clock is from this process's clock; None: not measured yet."""
        return self._comparison.offset(CLOCK.wall_ns(now()))

    @property
    def round_trip_s(self) -> float:
        """The mean seconds that a message recently took to the worker and back."""
        return self._comparison.delay_s

    def compare(self, load: pb.Load) -> pb.Beat | None:
        """Note a report, which says when it was sent and which beat it answers; return the next beat if one is due."""
        at, sent_ns, answered_ns = now(), load.beat_sent_ns, load.wall_time_ns
        if sent_ns:
            self._comparison.note(sent_ns, answered_ns - load.beat_held_ns, answered_ns, CLOCK.wall_ns(at))
        return self._beat() if self._comparison.is_due(at) else None

    def _beat(self) -> pb.Beat:
        beat = pb.Beat(sent_ns=CLOCK.wall_ns(now()))
        if offset := self.offset:
            beat.offset_ns, beat.error_ns = round(1e9 * offset.offset_s), round(1e9 * offset.error_s)
        return beat
