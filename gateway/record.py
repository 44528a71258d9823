"""What is known of one request, for its spans: filled in as it goes, complete or not when it ends."""

from dataclasses import dataclass, field

from baton.service.telemetry import TraceContext
from gateway.limits import Checked
from gateway.routing import Decision
from gateway.timing import Measured, Stamps


@dataclass(slots=True)
class Record:
    """`context` is the request's root span, `parent` the client's (span_id 0: it has none)."""

    context: TraceContext
    parent: TraceContext
    stamps: Stamps
    model: str
    operation: str  # chat | text_completion
    checked: Checked | None = None
    measured: Measured = field(default_factory=Measured)
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_matched_tokens: int = 0  # by the index, on the decode worker
    num_output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    decision: Decision | None = None
    num_attempts: int = 0
