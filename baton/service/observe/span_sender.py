"""Collect finished work, emit its spans once a second, and send them every few seconds, in a thread of their own.

Emitting many in a row takes a third of the CPU of emitting each right after its request, when the caches hold other
data (in a gateway 37 us a request instead of 117, exploratory, on an EPYC); and no event loop waits for it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from baton.service.observe.span_exporter import FinishedSpan, SpanExporter

_EMIT_S = 1.0
_MAX_INTERVAL_S = 30.0  # between two tries while the collector takes nothing: each takes 2 ms of CPU (exploratory)
_BATCH = 512
_MAX_TRIES = 5  # per batch: the collector may be down for some 90 s, or never accept this batch
_MAX_WAITING = 16_384 - _BATCH  # spans, besides those of a batch
_MAX_UNEMITTED = 4_096  # requests and keys
_QUIET_S = 60.0  # between two log lines about dropped spans

log = logging.getLogger(__name__)


class SpanSender:
    """Hold work to emit and spans to send. The oldest are dropped while a collector accepts nothing for long, or never
    accepts them.

    Sends every `interval_s`, sooner if a batch is full, and less often while the collector accepts nothing."""

    def __init__(self, exporter: SpanExporter, interval_s: float):
        self._exporter = exporter
        self._unemitted: deque[tuple[Callable[..., object], tuple]] = deque(maxlen=_MAX_UNEMITTED)
        self._waiting: deque[FinishedSpan] = deque(maxlen=_MAX_WAITING)
        self._batch: list[FinishedSpan] = []  # the oldest spans, which the collector has not accepted yet
        self._num_tries = 0  # for `_batch`
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._min_interval_s = self._interval_s = interval_s
        self._next_at = time.monotonic() + interval_s
        self._num_dropped, self._reported_at = 0, -_QUIET_S
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def emit_later(self, emit: Callable[..., object], *args: object) -> None:
        """Call `emit(*args)`, which adds spans, within a second in the sender's thread."""
        self._append(self._unemitted, (emit, args))

    def add(self, *fields) -> None:
        """Queue the FinishedSpan of these fields for the next batch."""
        self._append(self._waiting, FinishedSpan(*fields))

    def _append(self, queue: deque, item: tuple) -> None:
        self._num_dropped += len(queue) == queue.maxlen
        queue.append(item)

    def flush(self) -> None:
        """Send everything that is queued now, even if the collector refused it before. It may take as long as an
        export."""
        with self._sending:
            self._emit()
            self._export()

    def shut_down(self) -> None:
        """Send what is queued, and stop. Spans that the collector does not accept are dropped."""
        self._closing.set()
        self._thread.join()
        self.flush()
        self._num_dropped += len(self._batch) + len(self._waiting)
        self._report_drops()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing.wait(min(_EMIT_S, self._min_interval_s)):
            with self._sending:
                self._emit()
                if self._is_due():
                    self._export()
            if time.monotonic() - self._reported_at >= _QUIET_S:
                self._report_drops()

    def _is_due(self) -> bool:
        is_full = len(self._waiting) >= _BATCH and self._interval_s == self._min_interval_s
        return is_full or time.monotonic() >= self._next_at

    def _report_drops(self) -> None:
        if self._num_dropped:
            log.warning("telemetry: %d spans were dropped: the collector did not take them", self._num_dropped)
            self._num_dropped, self._reported_at = 0, time.monotonic()

    def _emit(self) -> None:
        while self._unemitted:
            emit, args = self._unemitted.popleft()
            try:
                emit(*args)
            except Exception:
                log.exception("telemetry: spans could not be emitted")
            time.sleep(0)  # an event loop that waits for the interpreter continues after one emission, not after 5 ms

    def _export(self) -> None:
        begun_at, is_sent = time.monotonic(), True
        while (self._batch or self._waiting) and is_sent:
            if not self._batch:
                self._batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            try:
                is_sent = self._exporter.send(self._batch)
            except Exception:
                log.exception("telemetry: spans could not be sent")
                is_sent = False
            self._num_tries += 1
            is_given_up = self._num_tries == _MAX_TRIES or len(self._waiting) == self._waiting.maxlen
            if not is_sent and is_given_up:
                self._num_dropped += len(self._batch)
            if is_sent or is_given_up:
                self._batch, self._num_tries = [], 0
            self._emit()  # an export may take seconds, and work that is not emitted yet keeps its request in memory
            doubled_s = max(self._min_interval_s, min(2 * self._interval_s, _MAX_INTERVAL_S))
            self._interval_s = self._min_interval_s if is_sent else doubled_s
        # counted from its start: from its end, each export would miss a turn of the thread
        self._next_at = begun_at + self._interval_s
