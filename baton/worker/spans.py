"""The spans of one key, drawn from its stamps after its end, whatever the end was. Prompts and tokens never go in.

    prefill ▸ prefill.queue, prefill.compute        where the prompt was read
    kv.transfer                                     where the KV was pulled to
    decode ▸ decode.queue, decode.steps             where the answer was written
"""

import time

from google.rpc import code_pb2

from baton.service import telemetry
from baton.service.telemetry import Clock, TraceContext
from baton.worker.leg import Leg


class Spans:
    """Draws the spans of the keys of one worker."""

    def __init__(self, model_name: str):
        self._clock = Clock()
        self._model_name = model_name

    def draw(self, leg: Leg) -> None:
        """Of a key that has just ended."""
        if leg.request is None or not telemetry.enabled():
            return
        parent = telemetry.parse_traceparent(leg.request.traceparent)
        if parent is None or not parent.sampled:
            return
        ended_at = time.monotonic()
        if leg.is_prefill:
            self._draw_prefill(leg, parent, ended_at)
        if leg.fetch_at is not None:
            self._draw_transfer(leg, parent, ended_at)
        if leg.start_at is not None:
            self._draw_decode(leg, parent, ended_at)

    def _draw_prefill(self, leg: Leg, parent: TraceContext, ended_at: float) -> None:
        done = leg.prefill_done
        # The engine's own stamps: when the loop told us is the delivery's time, not the prefill's.
        end_at = leg.opened_at + done.queue_s + done.prefill_s if done else ended_at
        attributes = self._attributes(leg) | {
            "gen_ai.usage.input_tokens": leg.request.num_prompt_tokens,
            "baton.num_cached_tokens": done.num_cached_tokens if done else None,
            "baton.num_chunks": done.num_chunks if done else None,
        }
        # What became of the lease later is not the prefill's failure.
        status = "ok" if done else _status(leg)
        span = self._emit("prefill", parent, leg.opened_at, end_at, attributes, status)
        if done:
            launched_at = leg.opened_at + done.queue_s
            self._emit("prefill.queue", span, leg.opened_at, launched_at, {}, "ok")
            self._emit("prefill.compute", span, launched_at, end_at, {}, "ok")

    def _draw_transfer(self, leg: Leg, parent: TraceContext, ended_at: float) -> None:
        report = leg.fetch_report
        attributes = self._attributes(leg)
        if report:
            attributes |= {
                "baton.num_tokens": report.num_tokens,
                "baton.num_bytes": report.num_bytes,
                "baton.transport": report.transport,
                "baton.transfer_s": report.transfer_s,
                "baton.after_last_ready_s": report.after_last_ready_s,
            }
        end_at = leg.fetch_ended_at or ended_at
        self._emit("kv.transfer", parent, leg.fetch_at, end_at, attributes, "ok" if report else _status(leg))

    def _draw_decode(self, leg: Leg, parent: TraceContext, ended_at: float) -> None:
        report = leg.report
        attributes = self._attributes(leg) | {
            "gen_ai.usage.output_tokens": leg.num_output_tokens,
            "baton.num_steps": report.num_steps if report else None,
            "baton.num_preemptions": report.num_preemptions if report else None,
            "baton.kv_wait_s": leg.kv_wait_s,
        }
        span = self._emit("decode", parent, leg.start_at, ended_at, attributes, _status(leg))
        if report and report.num_steps:
            first_at = min(leg.start_at + leg.kv_wait_s + report.decode_queue_s, ended_at)
            self._emit("decode.queue", span, leg.start_at, first_at, {}, "ok")
            self._emit("decode.steps", span, first_at, ended_at, {}, _status(leg))

    def _attributes(self, leg: Leg) -> dict[str, object]:
        failed = leg.status.code not in (code_pb2.OK, code_pb2.CANCELLED)
        return {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": leg.key.request_id,
            "baton.attempt": leg.key.attempt,
            "error.type": leg.status.reason if failed else None,
        }

    def _emit(self, name: str, parent: TraceContext, start: float, end: float, attributes, status: str) -> TraceContext:
        window = (self._clock.wall_ns(start), self._clock.wall_ns(end))
        return parent._replace(span_id=telemetry.emit_span(name, parent, *window, attributes, status))


def _status(leg: Leg) -> str:
    if leg.status.code == code_pb2.CANCELLED:
        return "cancelled"
    return "error" if leg.status.code else "ok"
