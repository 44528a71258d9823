"""Metrics over OTLP/gRPC by the names of the GenAI semantic conventions (v1.41): gen_ai.server.request.duration,
.time_to_first_token and .time_per_output_token. They are observed when a request ends and sent by a thread of their
own; without an endpoint no library is loaded. The few operations and error types bound the number of series."""

from __future__ import annotations

import logging
import os
from typing import Any

from baton.service.net.collector import collector_endpoint
from baton.service.observe.telemetry import EXPORT_TIMEOUT_S, FLUSH_S, exporter_options, within

INTERVAL_MS = 5000
DURATION_BUCKETS = tuple(0.01 * 2**n for n in range(14))
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

log = logging.getLogger(__name__)
_sender: _MetricsSender | None = None


def setup(service_name: str, endpoint: str | None = None) -> bool:
    """Send this process's metrics to `endpoint` (default: that of OpenTelemetry's variables) and return whether they
    are sent. They are off without an endpoint, or if the variables cannot be followed, which is logged."""
    global _sender
    shut_down()
    if endpoint := endpoint or collector_endpoint("METRICS"):
        try:
            _sender = _MetricsSender(service_name, exporter_options(endpoint, "METRICS"))
        except Exception as error:  # of the SDK, about a variable
            log.error("no metrics are sent: %s", error)
    return _sender is not None


def observe(
    operation: str,
    model: str,
    request_s: float,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    error_type: str | None = None,
) -> None:
    """Record one request that has ended; None stands for a time or error that it does not have."""
    if _sender is not None:
        _sender.observe(operation, model, request_s, ttft_s, tpot_s, error_type)


def shut_down(timeout_s: float = FLUSH_S) -> None:
    """Send the pending metrics and turn metrics off."""
    global _sender
    sender, _sender = _sender, None
    if sender and not within(sender.provider.shutdown, timeout_s):
        log.warning("telemetry: the collector did not take the last metrics within %.0f s", timeout_s)


class _MetricsSender:
    """The SDK's aggregation and exporter; only this class loads them."""

    def __init__(self, service_name: str, options: dict[str, Any]):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        exporter = OTLPMetricExporter(**options)
        reader = PeriodicExportingMetricReader(exporter, INTERVAL_MS, 1000 * EXPORT_TIMEOUT_S)
        resource = Resource.create({"service.name": service_name, "process.pid": os.getpid()})
        self.provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self.provider.get_meter("baton")

        def histogram(name: str, text: str, buckets: tuple[float, ...]):
            return meter.create_histogram(
                f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=buckets
            )

        self._duration = histogram("request.duration", "arrival to the end", DURATION_BUCKETS)
        self._ttft = histogram("time_to_first_token", "time from arrival until the first token is sent", TTFT_BUCKETS)
        self._tpot = histogram("time_per_output_token", "time per output token after the first", TPOT_BUCKETS)

    def observe(self, operation, model, request_s, ttft_s, tpot_s, error_type) -> None:
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        if error_type is not None:
            attributes["error.type"] = error_type
        self._duration.record(request_s, attributes)
        if ttft_s is not None:
            self._ttft.record(ttft_s, attributes)
        if tpot_s is not None:
            self._tpot.record(tpot_s, attributes)
