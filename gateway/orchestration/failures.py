"""Judge the failed attempts of one request: which worker is to blame, which error the client gets, whether to retry."""

import grpc

from baton.protocol import ATTACHED, ENGINE_FAILED, KV_REASONS, KV_TRANSFER_FAILED, STEP_FAILED
from baton.service.clock import now
from baton.service.errors import BatonError, Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.answer.answer import Answer
from gateway.attempts.attempt import Attempt
from gateway.attempts.failure_limits import FINAL_CODES, FailureLimits, error_of, is_draining, is_stalled
from gateway.attempts.request_router import RequestRouter
from gateway.link.mailbox import Lost
from gateway.link.worker_link import WorkerLink
from gateway.orchestration.states import Occurrence, RequestEvent
from gateway.request.request_record import Failure, RequestRecord
from gateway.request.request_state import RequestState

_WORKER_WAIT_S = 2.5  # the wait for another worker after a lost one; sessions are retried at least every 2 s
_FAULTY_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_FINAL_REASONS = (ATTACHED,)  # the client continues the request through another gateway
_PREFILL_EVENTS = (RequestEvent.PREFILL_ENDED, RequestEvent.PREFILL_FAILED, RequestEvent.PREFILL_LOST)


class RequestFailures:
    """Judge the failures of one request, and bound its waits for a worker that replaces a lost one."""

    __slots__ = (
        "_limits",
        "_router",
        "_answer",
        "_record",
        "_unreplaced",
        "_waits_since",
        "_awaited",
    )

    def __init__(self, limits: FailureLimits, router: RequestRouter, answer: Answer, record: RequestRecord):
        self._limits, self._router, self._answer, self._record = limits, router, answer, record
        self._unreplaced: tuple[BatonError, float] | None = (
            None  # the last failure, and when to report it to the client
        )
        self._waits_since: float | None = None  # since when the request has waited for any worker
        self._awaited: BatonError | None = None  # the error to report if no worker comes

    def judge(self, event: Occurrence, attempt: Attempt) -> None:
        """Count the failure that ended `attempt`, and avoid its worker from now on. Raises BatonError if the request
        must not be tried again."""
        error, blamed, worker_id = self._failure(event, attempt)
        if _may_have_died_of_it(event, attempt):
            self._limits.note_death(event.payload, blamed, worker_id)
        self._note(event, error, blamed)
        self._router.note_failure(worker_id, is_draining(event.payload))
        is_routed_around = _is_worker_gone(event.payload)
        if _is_kv_missing(event, attempt):
            is_routed_around = self._router.note_fetch_failed(blamed, attempt.decode.link, error.message)
        if _is_fault(event, error):
            blamed.note_failure(f"{event.kind.value} while {event.before.value}")
        if error.code in FINAL_CODES or error.reason in _FINAL_REASONS:
            raise error
        self._limits.check_deaths()
        self._limits.spend_retry(error, attempt.has_stepped, is_routed_around)
        self._unreplaced = error, now() + _WORKER_WAIT_S

    def note_replaced(self) -> None:
        """Note that a worker was found for the next attempt."""
        self._unreplaced = self._waits_since = self._awaited = None

    def check_wait(self, error: Unavailable) -> None:
        """Return if a worker may still come: a lost one may be reconnecting, another may be starting.

        Otherwise raises the last failure, or `error` if the request has not failed before."""
        self._waits_since = self._waits_since or now()
        failure, until = self._unreplaced or (error, 0.0)
        if self._router.expects_worker():
            until = max(until, self._waits_since + self._router.max_start_wait_s)
        self._awaited = failure
        if now() >= until:
            self.end_wait()

    @property
    def awaits_worker(self) -> bool:
        """Return whether the request waits for a worker to come, not for a worker to have room."""
        return self._awaited is not None

    def end_wait(self) -> None:
        """Raise the error of a request for which no worker came; return if it was not waiting for one."""
        if self._awaited is not None:
            if self._unreplaced is not None:
                self._record.phase = self._record.failures[-1].phase
            raise self._awaited

    def _failure(self, event: Occurrence, attempt: Attempt) -> tuple[BatonError, WorkerLink, bytes]:
        """Return the error for the client, the worker to blame, and that worker's id."""
        before, message = event.before, event.payload
        is_prefill = _is_of_prefill(event)
        leg, role = (attempt.prefill, "prefill") if is_prefill else (attempt.decode, "decode")
        blamed, worker_id = leg.link, leg.worker_id
        sent = f" after {self._answer.num_output_tokens} tokens" if self._answer.has_begun else ""
        error, giver = error_of(message, role, sent), attempt.kv_source
        is_reported = isinstance(message, pb.Ended) and bool(message.code)
        if is_reported and not is_prefill and giver and message.reason in KV_REASONS:
            blamed, worker_id = giver, giver.worker_id
            if before is RequestState.FETCHING and attempt.prefill is not None:
                self._limits.deaths.suspect(blamed, attempt.prefill.worker_id)
        return error, blamed, worker_id

    def _note(self, event: Occurrence, error: BatonError, blamed: WorkerLink) -> None:
        is_reported = isinstance(event.payload, pb.Ended) and bool(event.payload.code)
        phase, sent = event.before, self._answer.num_output_tokens
        self._record.phase = phase
        failure = Failure(
            phase, _is_of_prefill(event), event.since, now(), blamed.name, error.reason, is_reported, sent
        )
        self._record.failures = (*self._record.failures, failure)


def _is_of_prefill(event: Occurrence) -> bool:
    """Return whether the prefill leg failed; False: the decode leg did."""
    is_silence = event.kind is RequestEvent.SILENCE and event.before is RequestState.PREFILLING
    return is_silence or event.kind in _PREFILL_EVENTS


def _is_fault(event: Occurrence, error: BatonError) -> bool:
    """Return whether the worker is at fault whatever the request: no answer, or an end without a reason."""
    message = event.payload
    if isinstance(message, pb.Ended):
        is_own = error.code in _FAULTY_CODES and error.reason != STEP_FAILED  # that may be the request's
        return not message.code or error.reason == ENGINE_FAILED or is_own
    return event.before in (RequestState.ADMITTING, RequestState.PREFILLING)


def _is_worker_gone(message: object) -> bool:
    return isinstance(message, Lost) or is_draining(message) or is_stalled(message)


def _is_kv_missing(event: Occurrence, attempt: Attempt) -> bool:
    """Return whether KV did not arrive although both workers still have their sessions: then the connection between
    the two workers is at fault."""
    message, source = event.payload, attempt.kv_source
    if _is_of_prefill(event) or not isinstance(message, pb.Ended) or message.reason != KV_TRANSFER_FAILED:
        return False
    if source is None or not source.worker_id or attempt.has_lost_decode_worker:
        return False
    return attempt.prefill is None or source.worker_id == attempt.prefill.worker_id


def _may_have_died_of_it(event: Occurrence, attempt: Attempt) -> bool:
    """Return whether the worker was computing the request, and had completed no step of it."""
    before = event.before
    if event.kind in (RequestEvent.PREFILL_LOST, RequestEvent.PREFILL_FAILED):
        return before in (RequestState.PREFILLING, RequestState.FETCHING)
    # A prompt that the worker reads with Admit may kill it before it sends Granted.
    is_local_prefill = attempt.prefill_link is None and (
        before is RequestState.PREFILLING or (before is RequestState.ADMITTING and attempt.prefills_on_admit)
    )
    return not attempt.has_stepped and (attempt.is_decoding or is_local_prefill)
