"""A real OTLP/gRPC receiver: collects the spans and metrics that any process sends to it.

with Receiver() as receiver:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    ...
    spans = receiver.wait_for(lambda spans: any(span.name == "decode" for span in spans))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.pace import patience


@dataclass(frozen=True)
class Span:
    name: str
    service: str  # service.name of the process
    pid: int
    trace_id: str  # hex
    span_id: str
    parent_id: str  # "": a root
    kind: str  # internal | server | client
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    is_error: bool
    links: tuple[str, ...] = field(default=())  # span ids
    events: tuple[tuple[str, dict[str, object]], ...] = field(default=())  # name, attributes

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def status(self) -> str:
        """ok | error | cancelled"""
        return str(self.attributes.get("baton.status", ""))


@dataclass(frozen=True)
class Point:
    """A histogram as one process last sent it, of one set of attributes."""

    service: str
    name: str
    unit: str
    attributes: dict[str, object]
    count: int
    sum: float
    bounds: tuple[float, ...]


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    """The metrics half of a Receiver."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def Export(self, request, context):
        self.points.extend(_points(request))
        return metrics_service_pb2.ExportMetricsServiceResponse()


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a port that the system chooses; `endpoint` is for the processes."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.metrics = Metrics()
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self.metrics, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Receiver:
        self._server.start()
        return self

    def __exit__(self, *exc) -> None:
        self._server.stop(0).wait()

    def Export(self, request, context):
        with self._arrived:
            self.spans.extend(_spans(request))
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, enough: Callable[[list[Span]], bool], timeout_s: float = 10) -> list[Span]:
        """Return all spans, once `enough` says so. Fails naming what has arrived."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: enough(self.spans), patience(timeout_s)):
                raise AssertionError(f"spans after {timeout_s} s: {[span.name for span in self.spans]}")
            return list(self.spans)

    def trace(self, trace_id: str) -> list[Span]:
        """Return the spans of one trace that have arrived, by start."""
        with self._arrived:
            return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)


def _spans(request) -> Iterator[Span]:
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield Span(
                    name=span.name,
                    service=str(resource.get("service.name")),
                    pid=int(resource.get("process.pid", 0)),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                    links=tuple(link.span_id.hex() for link in span.links),
                    events=tuple((event.name, _attributes(event.attributes)) for event in span.events),
                )


def _points(request) -> Iterator[Point]:
    for resource_metrics in request.resource_metrics:
        service = str(_attributes(resource_metrics.resource.attributes).get("service.name"))
        for scope_metrics in resource_metrics.scope_metrics:
            for metric in scope_metrics.metrics:
                for point in metric.histogram.data_points:
                    attributes, bounds = _attributes(point.attributes), tuple(point.explicit_bounds)
                    yield Point(service, metric.name, metric.unit, attributes, point.count, point.sum, bounds)


def _attributes(pairs) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value):
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
