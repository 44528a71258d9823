"""Write one log line for each request that has ended, however it ended. It has no content, only numbers, ids and fixed
words."""

import logging

from baton.service.logs import fields
from gateway.observe.meters import outcome
from gateway.observe.predictions import predictions
from gateway.request.request_record import RequestRecord
from gateway.request.timing import breakdown, timing

log = logging.getLogger(__name__)


def ended(record: RequestRecord, error: BaseException | None) -> None:
    """Log a request that has ended. Phases that it did not reach are left out; durations are milliseconds."""
    if log.isEnabledFor(logging.INFO):
        log.info("request ended %s", fields(**line(record, error)))


def line(record: RequestRecord, error: BaseException | None) -> dict[str, object]:
    """Return the fields of the log line."""
    (how, reason), stamps = outcome(error), record.stamps
    durations = timing(stamps, record.measured, record.num_longest_output)
    spent = breakdown(stamps, record.measured)
    values: dict[str, object] = {
        "request_id": record.request_id,
        "trace_id": f"{record.context.trace_id:032x}",
        "tenant": record.tenant,
        "model": record.model or "-",
        "outcome": how,
        "reason": reason or "-",
        "phase": "-" if error is None else record.phase_name,
        "input_tokens": record.num_prompt_tokens or 0,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "batch_size": record.batch_size,
        "num_attempts": record.num_attempts,
        "route": record.decision.reason if record.decision else "-",
        **_prediction(record),
        "total_ms": _ms(sum(spent.values())),
        "ttft_ms": _ms(record.ttft_s or 0.0),
        "tpot_ms": _ms(durations.tpot_s),
    }
    return values | {f"{phase}_ms": _ms(seconds) for phase, seconds in spent.items()}


def _prediction(record: RequestRecord) -> dict[str, object]:
    """Return the predicted and the actual time from the decision to the end, or "-" if they cannot be compared."""
    if not (found := predictions(record)):
        return {"route_predicted_ms": "-", "route_taken_ms": "-"}
    _, predicted_s, taken_s = found[-1]
    return {"route_predicted_ms": _ms(predicted_s), "route_taken_ms": _ms(taken_s)}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
