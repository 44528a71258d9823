"""Make the gateway's spans of a request from its record when it has ended, however it ended. They have no content.

    {operation} {model}          events: retry (a worker had no room), migration (an attempt ended, another began)
      ▸ tokenize                 only if the request ended in it
      ▸ route ▸ admit
      ▸ prefill.wait             only of requests that waited for room on a prefill worker
      ▸ prefill | kv.transfer | decode   only in place of spans that a lost worker cannot emit

A failure is recorded on the span in which it happened and on the root.
"""

from collections.abc import Iterator
from typing import NamedTuple

from baton.sampling_params import SAMPLING_PARAMS
from baton.service.errors import BatonError
from baton.service.observe import telemetry
from baton.service.observe.telemetry import CLOCK, SpanEvent, emit_span
from gateway.request.request_record import Failure, RequestRecord
from gateway.request.request_state import RequestState
from gateway.request.timing import breakdown

_SAMPLING = [name for name, param in SAMPLING_PARAMS.items() if param.in_traces]
_LEAST_WAIT_S = 0.001  # a shorter wait is none
_LOST = {
    RequestState.ADMITTING: "admit",
    RequestState.AWAITING_PREFILL: "prefill.wait",
    RequestState.PREFILLING: "prefill",
    RequestState.DECODING: "decode",
}


class _Outcome(NamedTuple):
    """How a request ended. It has no exception, whose traceback would keep all that the request had."""

    is_error: bool
    status: str
    attributes: dict[str, object]


def emit(record: RequestRecord, error: BaseException | None) -> None:
    """Emit the spans of a request that has ended, from its stamps, within a second. Workers emit their own spans."""
    if telemetry.enabled() and record.context.sampled:
        outcome = _Outcome(error is not None, _status(error), _error_attributes(error))
        telemetry.emit_later(_emit_request, record, outcome)


def _emit_request(record: RequestRecord, outcome: _Outcome) -> None:
    stamps = record.stamps
    emit_span(
        f"{record.operation} {record.model}",
        record.parent,
        CLOCK.wall_ns(stamps.received),
        CLOCK.wall_ns(stamps.ended),
        _attributes(record, outcome),
        outcome.status,
        span_id=record.context.span_id,
        kind="server",
        events=list(_events(record)),
    )
    if stamps.tokenized is None:
        if record.validated is not None:
            _emit_child(record, "tokenize", stamps.received, None, {}, outcome)
        return
    _emit_child(record, "route", stamps.tokenized, stamps.routed, _route_attributes(record), outcome)
    if stamps.routed is not None:
        _emit_child(record, "admit", stamps.routed, stamps.granted, {}, outcome)
    if stamps.granted is not None and _waited(record):
        _emit_child(record, "prefill.wait", stamps.granted, stamps.prefill_sent, {}, outcome)
    for failure in record.failures:
        if not failure.is_reported:
            _emit_lost(record, failure)


def _emit_child(
    record: RequestRecord, name: str, begin: float, end: float | None, attributes: dict, outcome: _Outcome
) -> None:
    """Emit the span of a phase. `end` is None if the request ended in it."""
    status = "ok" if end is not None else outcome.status
    attributes = attributes | outcome.attributes if end is None else attributes
    window_ns = CLOCK.wall_ns(begin), CLOCK.wall_ns(end or record.stamps.ended)
    emit_span(name, record.context, *window_ns, attributes, status)


def _emit_lost(record: RequestRecord, failure: Failure) -> None:
    """Emit the span of the work of a worker that was lost or is silent, as seen from here."""
    name = _LOST.get(failure.phase, "prefill" if failure.is_prefill else "kv.transfer")  # FETCHING has two workers
    attributes = {
        "error.type": failure.reason,
        "baton.worker": failure.worker,
        "baton.seen_by": "gateway",
        "gen_ai.request.model": record.model,
    }
    window_ns = CLOCK.wall_ns(failure.begun_at), CLOCK.wall_ns(failure.at)
    emit_span(name, record.context, *window_ns, attributes, "error")


def _waited(record: RequestRecord) -> bool:
    stamps = record.stamps
    if stamps.prefill_sent is None:
        return record.phase is RequestState.AWAITING_PREFILL
    return stamps.prefill_sent - stamps.granted > _LEAST_WAIT_S


def _events(record: RequestRecord) -> Iterator[SpanEvent]:
    for retry in record.retries:
        attributes = {"baton.worker": retry.worker, "baton.phase": retry.phase, "baton.reason": retry.reason}
        yield SpanEvent("retry", CLOCK.wall_ns(retry.at), attributes)
    for failure in record.failures[: max(0, record.num_attempts - 1)]:
        attributes = {
            "baton.worker": failure.worker,
            "baton.phase": failure.phase.value,
            "baton.reason": failure.reason,
            "gen_ai.usage.output_tokens": failure.num_output_tokens,
        }
        yield SpanEvent("migration", CLOCK.wall_ns(failure.at), attributes)


def _status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, BatonError):
        return "cancelled" if error.reason == "CANCELLED" else "error"
    return "error" if isinstance(error, Exception) else "cancelled"


def _attributes(record: RequestRecord, outcome: _Outcome) -> dict[str, object]:
    measured, stamps = record.measured, record.stamps
    attributes: dict[str, object] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "baton.tenant": record.tenant,
        "baton.num_attempts": record.num_attempts,
        "baton.batch_size": record.batch_size or None,
        "baton.phase": record.phase_name if outcome.is_error else None,
        "baton.transfer_s": measured.transfer_s or None,
        "baton.ttft_s": record.ttft_s,
    }
    attributes |= {f"baton.phase.{name}_s": spent for name, spent in breakdown(stamps, measured).items()}
    attributes |= outcome.attributes
    if record.validated is not None:
        attributes |= _request_attributes(record)
    return attributes


def _error_attributes(error: BaseException | None) -> dict[str, object]:
    if isinstance(error, BatonError):
        return {"error.type": error.reason, "rpc.grpc.status_code": error.code.value[0]}
    return {"error.type": type(error).__name__} if isinstance(error, Exception) else {}


def _request_attributes(record: RequestRecord) -> dict[str, object]:
    validated, sampling = record.validated, record.validated.sampling
    return {
        "gen_ai.request.max_tokens": validated.max_tokens,
        **{f"gen_ai.request.{name}": _shortest(getattr(sampling, name)) for name in _SAMPLING},
        "gen_ai.request.seed": str(sampling.seed),  # 64 bits do not fit an OTLP integer
        "gen_ai.request.choice.count": sampling.n,
        "baton.priority": validated.priority,
        "baton.slo_class": validated.slo_class,
    }


def _shortest(value: float) -> float:
    """Return the shortest number that equals `value` in fp32, which messages carry: 0.6, not 0.6000000238418579. An
    integer is returned unchanged."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _route_attributes(record: RequestRecord) -> dict[str, object]:
    decision = record.decision
    if decision is None:
        return {}
    return {
        "baton.route.local": decision.is_local,
        "baton.route.reason": decision.reason,
        "baton.route.alternative": decision.alternative,
        "baton.route.prefill": decision.prefill,
        "baton.route.decode": decision.decode,
        "baton.route.source": record.source,
        "baton.route.num_matched_tokens": decision.num_matched_tokens,
        "baton.route.cost_s": decision.cost_s,
        "baton.route.alternative_s": decision.alternative_s,
        "baton.route.ttft_s": decision.ttft_s,
        "baton.route.tpot_s": decision.tpot_s,
    }
