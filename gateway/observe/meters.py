"""Metrics of the gateway: each request is counted once, when it has ended, from the same stamps as its timing and
spans."""

from collections.abc import Callable, Iterable, Mapping

from baton.protocol import TENANT_TOKENS
from baton.service.clock import now
from baton.service.errors import BatonError, FailedPrecondition
from baton.service.observe import genai_metrics
from baton.service.observe.metrics import (
    DURATION_BUCKETS,
    PHASE_BUCKETS,
    TPOT_BUCKETS,
    TTFT_BUCKETS,
    Count,
    Gauge,
    Histogram,
    Metrics,
)
from baton.service.slo import Slo
from baton.v1 import inference_pb2 as pb
from gateway.observe.predictions import predictions
from gateway.request.bottlenecks import seconds_by_bottleneck
from gateway.request.request_record import RequestRecord
from gateway.request.timing import breakdown, timing

_OBJECTIVES = ("ttft", "tpot", "e2e", "answer")  # answer: missed by requests without one
_ERROR_BUCKETS = (0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 5, 10)
_MAX_REASONS = 64  # values of a label; workers should send few, but are not trusted to
_MAX_TENANTS = 64  # values of a label: further tenants of the credentials file share OTHER
_REFUSED = frozenset(
    ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS")
)
# Refusals caused by the caller: the gateway could serve others.
_OF_CALLERS = frozenset(("TENANT_REQUESTS", TENANT_TOKENS, "SLOW_READER"))


class GatewayMeters:
    """Count each request once, when it has ended, under the model that it named. `page` serves /metrics."""

    def __init__(self, model_name: str, slo_classes: Mapping[str, Slo], readings: Iterable[Gauge | Count] = ()):
        """Count under `model_name` what belongs to the whole gateway, and expose `readings`, which are read at each
        scrape."""
        self._metrics, self._slo_classes = Metrics(model_name), slo_classes
        self.page, self.exposition = self._metrics.page, self._metrics.exposition
        self._models: dict[str, _ModelMeters] = {}  # only names that are served: requests cannot add others
        self._metrics.collect(*readings)
        self.of(model_name)

    def of(self, model_name: str) -> "_ModelMeters":
        """Return the counts of one model; the name is empty for requests that named none that is served."""
        if (meters := self._models.get(model_name)) is None:
            meters = self._models[model_name] = _ModelMeters(self._metrics.of(model_name), self._slo_classes)
        return meters

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Count a request that has ended, however it did."""
        self.of(record.model).ended(record, error)

    def itl_recorder_for(self, record: RequestRecord) -> Callable[[float], None]:
        """Return a function that records an inter-token latency of the request: the seconds between two messages of a
        choice, divided by the tokens of the later one."""
        return self.of(record.model).itl_recorder_for(record)


class _ModelMeters:
    """The counts of one model."""

    def __init__(self, metrics: Metrics, slo_classes: Mapping[str, Slo]):
        self._slo_classes = slo_classes
        self._reasons, self._tenants = _BoundedLabels(_MAX_REASONS), _BoundedLabels(_MAX_TENANTS)
        self._ttft = metrics.histogram(
            "baton_ttft_seconds", "time from arrival until the first token is sent", TTFT_BUCKETS
        )()
        self._tpot = metrics.histogram("baton_tpot_seconds", "time per output token after the first", TPOT_BUCKETS)()
        self._itl = metrics.histogram(
            "baton_itl_seconds", "time between messages, per token of the later one", TPOT_BUCKETS
        )()
        self._e2e = metrics.histogram(
            "baton_e2e_seconds", "time from arrival to the end, for answered requests", DURATION_BUCKETS
        )()
        self._phase = metrics.histogram("baton_phase_seconds", "one phase of a request", PHASE_BUCKETS, "phase")
        self._bottleneck = metrics.counter(
            "baton_bound_seconds", "seconds of answered requests by what they waited for", "bound"
        )
        self._requests = metrics.counter("baton_requests", "ended requests", "outcome", "reason")
        self._tokens = metrics.counter("baton_tokens", "tokens read and written", "kind")
        self._tenant_seconds = metrics.counter(
            "baton_tenant_seconds", "seconds that requests spent in each phase, by tenant", "tenant", "phase"
        )
        self._tenant_requests = metrics.counter(
            "baton_tenant_requests", "ended requests, by tenant", "tenant", "outcome"
        )
        self._tenant_tokens = metrics.counter(
            "baton_tenant_tokens", "tokens read and written, by tenant", "tenant", "kind"
        )
        self._migrations = metrics.counter("baton_migrations", "attempts after the first")()
        self._attached = metrics.counter("baton_attached", "lost streams that were resumed")()
        self._recovered = metrics.counter(
            "baton_recovery_tokens", "prompt tokens of later attempts, by whether their KV was reused", "kv"
        )
        self._routes = metrics.counter("baton_routes", "requests by route and reason", "way", "reason")
        self._route_cost = metrics.histogram(
            "baton_route_cost_seconds",
            "predicted cost of the route that was taken and of the other",
            DURATION_BUCKETS,
            "way",
        )
        self._prediction = metrics.histogram(
            "baton_route_prediction_ratio", "predicted over measured time, from the decision on", _ERROR_BUCKETS, "part"
        )
        self._slo_requests = metrics.counter(
            "baton_slo_requests", "requests that count towards their service level", "class"
        )
        self._slo_met = metrics.counter("baton_slo_met", "requests that met their service level", "class")
        self._slo_missed = metrics.counter(
            "baton_slo_missed", "requests that missed their service level, by the missed goal", "class", "objective"
        )
        for name in slo_classes:
            self._slo_requests(name)
            self._slo_met(name)
            for objective in _OBJECTIVES:
                self._slo_missed(name, objective)

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Count a request that has ended, however it did."""
        how, reason = outcome(error)
        tenant = self._tenants.bounded(record.tenant)
        self._requests(how, self._reasons.bounded(reason)).inc()
        self._tenant_requests(tenant, how).inc()
        if record.num_attempts > 1:
            self._migrations.inc(record.num_attempts - 1)
        self._attached.inc(record.num_attached)
        self._recovered("reused").inc(record.num_reused_tokens)
        self._recovered("computed").inc(record.num_recomputed_tokens)
        stamps = record.stamps
        measured = timing(stamps, record.measured, record.num_longest_output)
        self._count_slo(record, error, measured)
        self._count_route(record)
        exemplar = _exemplar(record)
        for kind, num in record.tokens_by_kind.items():
            self._tokens(kind).inc(num)
            self._tenant_tokens(tenant, kind).inc(num)
        for phase, spent_s in breakdown(stamps, record.measured).items():
            self._phase(phase).observe(spent_s, exemplar)
            self._tenant_seconds(tenant, phase).inc(spent_s)
        _record_otlp(record, error, measured)
        if stamps.first_sent is None:
            return
        if (ttft_s := record.ttft_s) is not None:
            self._ttft.observe(ttft_s, exemplar)
        if measured.tpot_s:
            self._tpot.observe(measured.tpot_s, exemplar)
        if error is None:
            for bottleneck, spent_s in seconds_by_bottleneck(stamps, record.measured).items():
                self._bottleneck(bottleneck).inc(spent_s)
            self._e2e.observe((stamps.last_sent or now()) - stamps.received, exemplar)

    def _count_slo(self, record: RequestRecord, error: BaseException | None, durations: pb.Timing) -> None:
        """Count a request towards its service level. Left out are requests that the client ended, that exceeded its
        quota or whose answer it did not read, and requests that could not be served at all."""
        how, _ = outcome(error)
        if record.validated is None or how == "cancelled" or (how == "refused" and not _is_overload(error)):
            return
        name = record.validated.slo_class
        self._slo_requests(name).inc()
        missed = ["answer"]
        if error is None and record.stamps.first_sent is not None:
            missed = self._slo_classes[name].missed(record.ttft_s, durations.tpot_s or None, durations.total_s)
        for objective in missed:
            self._slo_missed(name, objective).inc()
        if not missed:
            self._slo_met(name).inc()

    def _count_route(self, record: RequestRecord) -> None:
        if (decision := record.decision) is None:
            return
        self._routes("local" if decision.is_local else "split", decision.reason).inc()
        self._route_cost("taken").observe(decision.cost_s)
        if decision.alternative_s is not None:
            self._route_cost("other").observe(decision.alternative_s)
        for part, predicted_s, taken_s in predictions(record):
            if taken_s > 0:
                self._prediction(part).observe(predicted_s / taken_s)

    def itl_recorder_for(self, record: RequestRecord) -> Callable[[float], None]:
        """Return a function that records an inter-token latency of the request; it is called for every message."""
        return _ItlRecorder(self._itl, _exemplar(record))


class _ItlRecorder:
    """Record the inter-token latencies of one request. A partial would be five times as large while the stream is
    open."""

    __slots__ = ("_itl", "_trace_id")

    def __init__(self, itl: Histogram, trace_id: int):
        self._itl, self._trace_id = itl, trace_id

    def __call__(self, itl_s: float) -> None:
        self._itl.observe(itl_s, self._trace_id)


class _BoundedLabels:
    """Bound the values of one label: the first `most` are kept, others become OTHER."""

    def __init__(self, most: int):
        self._known: set[str] = set()
        self._most = most

    def bounded(self, word: str) -> str:
        if word not in self._known and len(self._known) >= self._most:
            return "OTHER"
        self._known.add(word)
        return word


def _record_otlp(record: RequestRecord, error: BaseException | None, measured: pb.Timing) -> None:
    """Record the request's durations for OTLP, under the names of OpenTelemetry's conventions."""
    how, reason = outcome(error)
    ended_s = (record.stamps.ended or record.stamps.received) - record.stamps.received
    error_type = None if how == "ok" else reason
    genai_metrics.observe(record.operation, record.model, ended_s, record.ttft_s, measured.tpot_s or None, error_type)


def outcome(error: BaseException | None) -> tuple[str, str]:
    """Return (ok | cancelled | refused | failed, the error's reason)."""
    if error is None:
        return "ok", ""
    if not isinstance(error, BatonError):
        return ("failed", "INTERNAL") if isinstance(error, Exception) else ("cancelled", "CANCELLED")
    if error.reason == "CANCELLED":
        return "cancelled", error.reason
    code = error.code.name
    # Something that the model cannot do, such as scores without a chat template. Workers that disagree fail with other
    # reasons.
    cannot = error.code is FailedPrecondition.code and error.reason == FailedPrecondition.reason
    return ("refused" if cannot or code in _REFUSED else "failed"), error.reason or code


def _is_overload(error: BaseException | None) -> bool:
    return isinstance(error, BatonError) and error.code.name == "RESOURCE_EXHAUSTED" and error.reason not in _OF_CALLERS


def _exemplar(record: RequestRecord) -> int:
    """Return the request's trace id, as an exemplar of a bucket; 0 if its trace is not sampled."""
    return record.context.trace_id if record.context.sampled else 0
