"""The gateway's spans of a request, drawn from its record when it has ended, however it ended. No content goes in."""

from baton.service.errors import BatonError
from baton.service.telemetry import Clock, TraceContext, emit_span
from gateway.record import Record
from gateway.timing import now

_CLOCK = Clock()


def draw(record: Record, error: BaseException | None) -> None:
    """The root span, and below it route and admit as far as the request came. Workers draw theirs."""
    stamps, ended, status = record.stamps, now(), _status(error)
    emit_span(
        f"{record.operation} {record.model}",
        record.parent,
        _CLOCK.wall_ns(stamps.received),
        _CLOCK.wall_ns(stamps.last_sent or ended),
        _attributes(record, error),
        status,
        span_id=record.context.span_id,
        kind="server",
    )
    if stamps.tokenized is not None:
        routed = stamps.routed or ended
        _draw_child(record.context, "route", stamps.tokenized, routed, _route_attributes(record), status)
    if stamps.routed is not None:
        _draw_child(record.context, "admit", stamps.routed, stamps.granted or ended, {}, status)


def _draw_child(parent: TraceContext, name: str, begin: float, end: float, attributes: dict, status: str) -> None:
    emit_span(name, parent, _CLOCK.wall_ns(begin), _CLOCK.wall_ns(end), attributes, status)


def _status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, BatonError):
        return "cancelled" if error.reason == "CANCELLED" else "error"
    return "error" if isinstance(error, Exception) else "cancelled"


def _attributes(record: Record, error: BaseException | None) -> dict[str, object]:
    measured, stamps = record.measured, record.stamps
    attributes: dict[str, object] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "baton.num_attempts": record.num_attempts,
        "baton.transfer_s": measured.transfer_s or None,
        "baton.ttft_s": None if stamps.first_sent is None else stamps.first_sent - stamps.received,
    }
    if isinstance(error, BatonError):
        attributes["error.type"] = error.reason
        attributes["rpc.grpc.status_code"] = error.code.value[0]
    elif isinstance(error, Exception):
        attributes["error.type"] = type(error).__name__
    if record.checked is not None:
        attributes |= _request_attributes(record)
    return attributes


def _request_attributes(record: Record) -> dict[str, object]:
    checked, sampling = record.checked, record.checked.sampling
    return {
        "gen_ai.response.id": checked.request_id,
        "gen_ai.request.max_tokens": checked.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.seed": str(sampling.seed),  # 64 bits do not fit an OTLP integer
        "gen_ai.request.choice.count": sampling.n,
        "baton.priority": checked.priority,
    }


def _route_attributes(record: Record) -> dict[str, object]:
    decision = record.decision
    if decision is None:
        return {}
    return {
        "baton.route.local": decision.local,
        "baton.route.reason": decision.reason,
        "baton.route.prefill": decision.prefill,
        "baton.route.decode": decision.decode,
        "baton.route.num_matched_tokens": record.num_matched_tokens,
    }
