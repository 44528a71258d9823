"""Traces over OTLP/gRPC. Spans are made after a request has ended, from stamps that were taken anyway and in the thread
that sends them, so a running request pays nothing. Without an endpoint no library is loaded and nothing is sent; trace
ids still propagate, for logs and errors."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.service.net.collector import Signal, collector_credentials, collector_endpoint

if TYPE_CHECKING:
    from baton.service.observe.span_sender import SpanSender

log = logging.getLogger(__name__)

FLUSH_S = 5.0  # exit waits no longer for a collector
EXPORT_TIMEOUT_S = 3
_EXPORT_INTERVAL_MS = 5000  # the SDK's own; an export takes 2 ms of CPU (exploratory), however few spans it has
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW_64 = (1 << 64) - 1
_STATUSES = ("ok", "error", "cancelled")
NO_ATTRIBUTES: Mapping[str, object] = MappingProxyType({})


class TraceContext(NamedTuple):
    """A span by its ids, which children and other processes refer to as their parent. span_id 0 means no span."""

    trace_id: int
    span_id: int
    sampled: bool = True


class SpanEvent(NamedTuple):
    """An event within a span."""

    name: str
    wall_ns: int
    attributes: Mapping[str, object] = NO_ATTRIBUTES


class Clock:
    """Convert monotonic stamps to wall time by one offset, so that all stamps of a process shift alike."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def wall_ns(self, stamp_s: float) -> int:
        """Return the wall time in ns of a monotonic stamp in seconds."""
        return self._offset_ns + round(stamp_s * 1e9)


CLOCK = Clock()  # of this process: what its spans are timed by, and what others compare theirs with


def new_context(parent: TraceContext | None = None, sample: float = 1.0) -> TraceContext:
    """Return ids for a span that starts now. With a parent it is in the parent's trace and sampled as the parent is.
    Otherwise it starts a trace, of which the share `sample` is sampled; the trace id decides, so that processes with
    other shares agree."""
    if parent is not None:
        return TraceContext(parent.trace_id, new_span_id(), parent.sampled)
    trace_id = secrets.randbits(128) or 1
    return TraceContext(trace_id, new_span_id(), trace_id & _LOW_64 < round(sample * (1 << 64)))


def new_span_id() -> int:
    return secrets.randbits(64) or 1


def span_id_of(trace_id: int, *parts: object) -> int:
    """Return the id of a span that another process emits, derived from `parts`: a process that knows the parts can link
    to it."""
    text = "\0".join(map(str, (trace_id, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def parse_traceparent(text: str) -> TraceContext | None:
    """Parse a W3C traceparent; None if `text` is not one."""
    found = _TRACEPARENT.fullmatch(text.strip())
    if not found or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    context = TraceContext(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))
    return context if context.trace_id and context.span_id else None


def format_traceparent(context: TraceContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.sampled):02x}"


_sender: SpanSender | None = None


def setup(service_name: str, endpoint: str | None = None) -> bool:
    """Send this process's spans to `endpoint` (default: that of OpenTelemetry's variables) and return whether they are
    sent. They are off without an endpoint, or if the variables cannot be followed, which is logged. Spans that are
    queued at exit are flushed within 5 s, or dropped if the collector does not answer."""
    global _sender
    shut_down()
    if endpoint := endpoint or collector_endpoint("TRACES"):
        try:
            from baton.service.observe.span_exporter import SpanExporter
            from baton.service.observe.span_sender import SpanSender

            exporter = SpanExporter(service_name, **exporter_options(endpoint, "TRACES"))
        except Exception as error:  # of the SDK, about a variable
            log.error("no spans are sent: %s", error)
        else:
            _sender = SpanSender(exporter, _export_interval_s())
    return _sender is not None


def exporter_options(endpoint: str, signal: Signal) -> dict[str, Any]:
    """Return the arguments of OpenTelemetry's exporters. Raises ValueError as `collector_credentials` does."""
    if (protocol := os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")) != "grpc":
        log.warning("OTEL_EXPORTER_OTLP_PROTOCOL is %s: %s goes by gRPC", protocol, signal.lower())
    credentials = collector_credentials(endpoint, signal)
    return {
        "endpoint": endpoint,
        "insecure": credentials is None,
        "credentials": credentials,
        "timeout": EXPORT_TIMEOUT_S,
    }


def _export_interval_s() -> float:
    """Return the interval that OTEL_BSP_SCHEDULE_DELAY (in ms) sets."""
    text = os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or str(_EXPORT_INTERVAL_MS)
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text) / 1e3
    log.warning("OTEL_BSP_SCHEDULE_DELAY is %r: give milliseconds, such as %d", text, _EXPORT_INTERVAL_MS)
    return _EXPORT_INTERVAL_MS / 1e3


def enabled() -> bool:
    """Return whether spans are sent."""
    return _sender is not None


def emit_later(emit: Callable[..., object], *args: object) -> None:
    """Call `emit(*args)`, which emits spans of finished work, within a second in the thread that sends them. Nothing
    that it reads may change any more."""
    if _sender:
        _sender.emit_later(emit, *args)


def emit_span(
    name: str,
    parent: TraceContext,
    start_wall_ns: int,
    end_wall_ns: int,
    attributes: Mapping[str, object] = NO_ATTRIBUTES,
    status: str = "ok",
    span_id: int | None = None,
    kind: str = "internal",
    links: Iterable[TraceContext] = (),
    events: Iterable[SpanEvent] = (),
) -> int:
    """Send one finished span below `parent`, in its trace, and return its id (a parent with span_id 0 makes it the
    root). status: ok | error | cancelled. kind: internal | server | client. Attributes that are None are left out."""
    span_id = span_id or new_span_id()
    if status not in _STATUSES:
        raise ValueError(f"unknown span status {status!r}")
    if _sender and parent.sampled:
        _sender.add(
            name, parent.trace_id, span_id, parent.span_id, start_wall_ns, end_wall_ns, attributes, status, kind, links,
            events,
        )  # fmt: skip
    return span_id


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Send what is queued; return False if it took longer than `timeout_s`."""
    return _sender is None or within(_sender.flush, timeout_s)


def within(work: Callable[[], object], timeout_s: float) -> bool:
    """Run `work` in a daemon thread and return whether it ended within `timeout_s`. The exporter's own timeouts do not
    bound what a collector that does not answer costs."""
    thread = threading.Thread(target=work, name="telemetry-flush", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def shut_down(timeout_s: float = FLUSH_S) -> None:
    """Flush and turn telemetry off; also runs at exit."""
    global _sender
    if _sender and not within(_sender.shut_down, timeout_s):
        log.warning("telemetry: the collector did not take all spans within %.0f s", timeout_s)
    _sender = None  # what was to be emitted until then is emitted through it


atexit.register(shut_down)
