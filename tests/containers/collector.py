"""A stand-in for the OpenTelemetry collector: takes spans and metrics over OTLP, keeps what it got, and says so at
:8889.

`python collector.py FILE` writes {service: {span or metric: count}} to FILE after each message.
"""

import json
import sys
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


class Kept:
    """Counts of names by service, in a file."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self._write()

    def add(self, resource, names: list[str]) -> None:
        service = next((each.value.string_value for each in resource.attributes if each.key == "service.name"), "?")
        with self._lock:
            self.counts[service].update(names)
            self._write()

    def _write(self) -> None:
        written = self._path.with_suffix(".part")
        written.write_text(json.dumps(self.counts))
        written.replace(self._path)


class Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, kept: Kept):
        self._kept = kept

    def Export(self, request, context):
        for group in request.resource_spans:
            self._kept.add(group.resource, [span.name for scope in group.scope_spans for span in scope.spans])
        return trace.ExportTraceServiceResponse()


class Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, kept: Kept):
        self._kept = kept

    def Export(self, request, context):
        for group in request.resource_metrics:
            self._kept.add(group.resource, [each.name for scope in group.scope_metrics for each in scope.metrics])
        return metrics.ExportMetricsServiceResponse()


def main(path: Path) -> None:
    kept = Kept(path)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            total = sum(sum(counts.values()) for counts in kept.counts.values())
            body = f"# TYPE collector_kept_total counter\ncollector_kept_total {total}\n".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    threading.Thread(target=ThreadingHTTPServer(("0.0.0.0", 8889), Page).serve_forever, daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_grpc.add_TraceServiceServicer_to_server(Traces(kept), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(kept), server)
    server.add_insecure_port("0.0.0.0:4317")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
