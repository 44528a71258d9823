"""All that is known of one request, for its spans, metrics and log line. It is filled in as the request proceeds, and
may be incomplete when the request ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.protocol import DEFAULT_TENANT
from baton.service.clock import now
from baton.service.observe.telemetry import TraceContext
from gateway.queue.waiting_queue import QueuedRequest
from gateway.request.request_state import RequestState
from gateway.request.timing import Measured, Stamps
from gateway.request.validation import ValidatedRequest
from gateway.routing.routing import Decision, RoutingRequest

_WITHOUT_TOKENS = frozenset(("embeddings", "rerank"))  # operations that read prompts and answer none
_MAX_RETRIES = 32  # that are kept: a request may wait for full workers for long


class Retry(NamedTuple):
    """A refusal by a worker without room, after which the request asked another one or waited."""

    at: float
    worker: str
    phase: str
    reason: str


class Failure(NamedTuple):
    """The failure of an attempt on a worker. If another attempt followed, the request moved."""

    phase: RequestState
    is_prefill: bool  # its prefill leg failed
    begun_at: float  # when the phase began
    at: float
    worker: str
    reason: str
    is_reported: bool  # by the worker itself, which emits its own spans
    num_output_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """`context` is the request's root span, `parent` the client's (span_id 0: it has none)."""

    context: TraceContext
    parent: TraceContext
    stamps: Stamps
    model: str
    operation: str  # chat | text_completion | embeddings | rerank
    tenant: str = DEFAULT_TENANT  # from the credential, never from the message
    request_id: str = ""
    validated: ValidatedRequest | None = None
    has_deadline: bool = True
    asked_s: float = 0.0  # the time that the client gave it, if it names a deadline
    measured: Measured = field(default_factory=Measured)
    num_prompt_tokens: int | None = None
    routing_request: RoutingRequest | None = None  # the request as routing sees it
    queued: QueuedRequest = QueuedRequest(0.0)  # as the queues see it
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_longest_output: int = 0  # of the longest choice
    finish_reasons: Sequence[str] = ()
    decision: Decision | None = None
    source: str | None = None  # the worker from which the one that read the prompt pulled a prefix
    num_attempts: int = 0
    # Of the answer, counted by an earlier stream, as the prompt was; None: no worker had the sequence of one.
    num_repeated_tokens: int | None = None
    num_attached: int = 0  # how often it continued a sequence whose stream was lost
    num_reused_tokens: int = 0  # by later attempts, from what other workers still held
    num_recomputed_tokens: int = 0
    batch_size: int = 0  # sequences on the decode worker when this one joined, as the worker last reported
    retries: tuple[Retry, ...] = ()
    failures: tuple[Failure, ...] = ()
    phase: RequestState | None = None  # the last one reached; None: the prompt is not tokenized yet

    @property
    def phase_name(self) -> str:
        """The phase in words for people."""
        if self.phase is None:
            return "validating" if self.validated is None else "tokenizing"
        return self.phase.value

    @property
    def ttft_s(self) -> float | None:
        """The seconds until the first token was sent; None if none was, as in operations that answer no tokens."""
        stamps = self.stamps
        if stamps.first_sent is None or self.operation in _WITHOUT_TOKENS:
            return None
        return stamps.first_sent - stamps.received

    @property
    def tokens_by_kind(self) -> dict[str, int]:
        """The tokens of the prompt if it was read, how many of them were cached, and the tokens written. For an answer
        whose sequence a worker still had, only new tokens count: the broken stream counted the others."""
        num_before = self.num_repeated_tokens
        has_begun = self.num_output_tokens > 0 or self.stamps.first_sent is not None
        was_read = has_begun and num_before is None
        return {
            "input": self.num_prompt_tokens or 0 if was_read else 0,
            "cached": self.num_cached_tokens if was_read else 0,
            "output": max(0, self.num_output_tokens - (num_before or 0)),
        }

    @property
    def num_charged_tokens(self) -> int:
        """The tokens of prompt and answer that came to the client, for which the tenant pays."""
        by_kind = self.tokens_by_kind
        return by_kind["input"] + by_kind["output"]

    def note_attached(self, num_tokens: Sequence[int]) -> None:
        """Note that the request continues a sequence, of which a worker has so many tokens of each choice (older
        workers do not say): it waited for neither credit nor prefill, and nothing of its prompt was computed. What the
        client has beyond them is only its word."""
        self.num_attached += 1
        self.num_attempts = max(1, self.num_attempts)
        stamps, at = self.stamps, now()
        if stamps.routed is None:
            stamps.routed = stamps.granted = at
            self.num_cached_tokens = self.num_prompt_tokens
            self.num_repeated_tokens = sum(map(min, num_tokens, self.validated.resume_from))

    def note_retry(self, worker: str, reason: str) -> None:
        """Note that a worker has refused the request."""
        if self.phase is RequestState.AWAITING_PREFILL and self.stamps.first_sent is None:
            self.stamps.prefill_sent = None  # that worker did not accept it
        if len(self.retries) < _MAX_RETRIES:
            self.retries = (*self.retries, Retry(now(), worker, self.phase_name, reason))
