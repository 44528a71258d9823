"""Emit the spans of one leg, made from its times after its end. They contain no prompts or tokens.

    prefill ▸ prefill.queue, prefill.compute        by the worker that read the prompt
    kv.transfer                                     by the worker that pulled the KV; linked to the source's prefill
    decode ▸ decode.queue, decode.steps             by the worker that wrote the answer; events: preemption

A span's id is made from its trace, key and name, so that another worker can link to it without being told the id.
"""

import time

from google.rpc import code_pb2

from baton.service.observe import telemetry
from baton.service.observe.telemetry import CLOCK, SpanEvent, TraceContext
from baton.worker.legs.leg import Leg


class Spans:
    """Emit the spans of the legs of one worker."""

    def __init__(self, model_name: str):
        self._model_name = model_name

    def emit(self, leg: Leg) -> None:
        """Emit the spans of a leg that has just ended, within a second."""
        if leg.request is None or not telemetry.enabled():
            return
        parent = telemetry.parse_traceparent(leg.traceparent)
        if parent is not None and parent.sampled:
            telemetry.emit_later(self._emit_leg, leg, parent, time.monotonic())

    def _emit_leg(self, leg: Leg, parent: TraceContext, ended_at: float) -> None:
        if leg.times.prefill_at is not None:
            self._emit_prefill(leg, parent, ended_at)
        if leg.times.fetch_at is not None:
            self._emit_transfer(leg, parent, ended_at)
        if leg.times.start_at is not None:
            self._emit_decode(leg, parent, ended_at)

    def _emit_prefill(self, leg: Leg, parent: TraceContext, ended_at: float) -> None:
        done = leg.prefill_done
        # From the engine's durations: outputs are delivered later than the prefill ends.
        end_at = leg.times.prefill_at + done.queue_s + done.prefill_s if done else ended_at
        attributes = self._attributes(leg) | {
            "gen_ai.usage.input_tokens": leg.request.num_prompt_tokens,
            "baton.num_cached_tokens": done.num_cached_tokens if done else None,
            "baton.num_chunks": done.num_chunks if done else None,
        }
        # If the lease fails later, the prefill has not.
        status = "ok" if done else _status(leg)
        span = self._emit_span("prefill", leg, parent, leg.times.prefill_at, end_at, attributes, status)
        if done:
            launched_at = leg.times.prefill_at + done.queue_s
            self._emit_span("prefill.queue", leg, span, leg.times.prefill_at, launched_at, {}, "ok")
            self._emit_span("prefill.compute", leg, span, launched_at, end_at, {}, "ok")

    def _emit_transfer(self, leg: Leg, parent: TraceContext, ended_at: float) -> None:
        report = leg.fetch_report
        attributes = self._attributes(leg)
        if report:
            attributes |= {
                "baton.num_tokens": report.num_tokens,
                "baton.num_bytes": report.num_bytes,
                "baton.transport": report.transport,
                "baton.transfer_s": report.transfer_s,
                "baton.after_last_ready_s": report.after_last_ready_s,
                "baton.num_bytes_early": report.num_bytes_early,
                "baton.numerics": report.numerics,
            }
        end_at = leg.times.fetch_ended_at or ended_at
        status = "ok" if report else _status(leg)
        # A prefix that a prefill worker pulls comes from another request, so there is no span to link to.
        links = [] if leg.times.prefill_at is not None else [self._context(leg, parent, "prefill")]
        self._emit_span("kv.transfer", leg, parent, leg.times.fetch_at, end_at, attributes, status, links)

    def _emit_decode(self, leg: Leg, parent: TraceContext, ended_at: float) -> None:
        report = leg.report
        attributes = self._attributes(leg) | {
            "gen_ai.usage.output_tokens": leg.num_output_tokens,
            "baton.num_steps": report.num_steps if report else None,
            "baton.num_preemptions": report.num_preemptions if report else None,
            "baton.kv_wait_s": leg.times.kv_wait_s,
        }
        if report and report.num_drafts:
            attributes |= {
                "baton.speculation.num_drafts": report.num_drafts,
                "baton.speculation.num_draft_tokens": report.num_draft_tokens,
                "baton.speculation.num_accepted_tokens": report.num_accepted_tokens,
                "baton.speculation.mean_accepted": report.num_accepted_tokens / report.num_drafts,
                "baton.speculation.acceptance_by_position": report.acceptance_by_position,
                "baton.speculation.speedup": report.speedup,
            }
        parked_at = report.preempted_at if report else ()
        events = [SpanEvent("preemption", _wall_ns(leg, at)) for at in parked_at]
        span = self._emit_span(
            "decode", leg, parent, leg.times.start_at, ended_at, attributes, _status(leg), events=events
        )
        if report and report.num_steps:
            first_at = min(leg.times.start_at + leg.times.kv_wait_s + report.decode_queue_s, ended_at)
            self._emit_span("decode.queue", leg, span, leg.times.start_at, first_at, {}, "ok")
            self._emit_span("decode.steps", leg, span, first_at, ended_at, {}, _status(leg))

    def _attributes(self, leg: Leg) -> dict[str, object]:
        clock = leg.outbox.clock
        return {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": leg.key.request_id,
            "baton.attempt": leg.key.attempt,
            "baton.clock.offset_s": clock.offset_s if clock else None,
            "baton.clock.error_s": clock.error_s if clock else None,
        }

    def _emit_span(
        self, name: str, leg: Leg, parent: TraceContext, start: float, end: float, attributes, status: str, links=(),
        events=(),
    ) -> TraceContext:  # fmt: skip
        context, window_ns = self._context(leg, parent, name), (_wall_ns(leg, start), _wall_ns(leg, end))
        if status == "error":
            attributes = attributes | {"error.type": leg.status.reason}
        telemetry.emit_span(
            name, parent, *window_ns, attributes, status, span_id=context.span_id, links=links, events=events
        )
        return context

    @staticmethod
    def _context(leg: Leg, parent: TraceContext, name: str) -> TraceContext:
        return parent._replace(span_id=telemetry.span_id_of(parent.trace_id, *leg.key, name))


def _wall_ns(leg: Leg, stamp_s: float) -> int:
    """Convert a time to the gateway's clock, if the difference is known, so that the spans of a trace nest."""
    clock = leg.outbox.clock
    return CLOCK.wall_ns(stamp_s - clock.correction_s if clock else stamp_s)


def _status(leg: Leg) -> str:
    if leg.status.code == code_pb2.CANCELLED:
        return "cancelled"
    return "error" if leg.status.code else "ok"
