"""Compare what routing predicted for a request with what it took."""

from typing import NamedTuple

from gateway.request.request_record import RequestRecord


class Prediction(NamedTuple):
    """Predicted and actual seconds, both from the decision on."""

    part: str  # ttft: to the first token; total: to the last
    predicted_s: float
    taken_s: float


def predictions(record: RequestRecord) -> list[Prediction]:
    """Return the predictions that can be compared: none if a worker refused the request, or it moved or waited for
    room, which no decision foresees. The total is predicted for the tokens that the answer had."""
    decision, stamps = record.decision, record.stamps
    if decision is None or stamps.routed is None or stamps.first_sent is None:
        return []
    if record.num_attempts != 1 or record.num_attached or record.retries:
        return []
    found = [Prediction("ttft", decision.ttft_s, stamps.first_sent - stamps.routed)]
    if stamps.last_sent is not None and record.num_longest_output > 1:
        total_s = decision.ttft_s + (record.num_longest_output - 1) * decision.tpot_s
        found.append(Prediction("total", total_s, stamps.last_sent - stamps.routed))
    return found
