"""Records of requests, as a gateway has them when they have ended."""

from baton.service.observe.telemetry import TraceContext
from gateway.request.request_record import RequestRecord
from gateway.request.timing import Stamps


def record(**stamps) -> RequestRecord:
    return RequestRecord(
        context=TraceContext(7, 8), parent=TraceContext(7, 0), stamps=Stamps(received=100.0, **stamps), model="tiny",
        operation="chat", num_prompt_tokens=12, num_cached_tokens=4, num_output_tokens=5, num_longest_output=5,
        num_attempts=1,
    )  # fmt: skip


ANSWERED = dict(
    tokenized=100.1,
    routed=100.2,
    granted=100.3,
    prefill_sent=100.3,
    first_sent=101.0,
    second_sent=101.2,
    last_sent=102.0,
)
