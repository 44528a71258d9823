"""What went wrong with the attempts of one request: whose fault it was, what a client would be told, and whether
another attempt makes sense."""

from typing import NamedTuple

import grpc

from baton.service.clock import now
from baton.service.errors import BatonError, Unavailable, from_code
from baton.v1 import worker_pb2 as pb
from gateway.answer.answer import Answer
from gateway.link.mailbox import Lost
from gateway.link.worker_leg import WorkerLeg
from gateway.link.worker_link import WorkerLink
from gateway.orchestration.retry_budget import Recovery, poison
from gateway.orchestration.states import Phase, RequestEvent
from gateway.request.request_record import Failure, Record

MAX_BARREN = 4  # attempts in a row in which nothing was decoded
_MAX_DEATHS = 2  # of workers that completed no step of this request
_KV_REASONS = frozenset(("KV_TRANSFER_FAILED", "LEASE_EXPIRED", "TICKET_REFUSED", "LAYOUT_MISMATCH", "DIGEST_MISMATCH"))
_DEADLY = {"ENGINE_FAILED": 1.0, "STALLED": 1.0, "STEP_FAILED": 0.5}  # in a step with others it may have been theirs
_FAULTY_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_FINAL_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED)
_FINAL_REASONS = ("ATTACHED",)  # the client has gone on elsewhere


class Trial(NamedTuple):
    """An attempt as it stands when it fails."""

    decode: WorkerLeg | None
    prefill: WorkerLeg | None
    source: WorkerLink | None  # who was to read the prompt for the decode worker
    holder: WorkerLink | None  # who was to give the decode worker a prefix
    is_decoding: bool  # steps ran, or could
    has_stepped: bool
    phase_at: float


class Failures:
    """Of one request."""

    def __init__(self, recovery: Recovery, prompt_digest: bytes, answer: Answer, record: Record):
        self.avoid: set[bytes] = set()  # workers that failed this request
        self._leaving: frozenset[bytes] = frozenset()  # of these, those that drain
        self._recovery, self._prompt_digest = recovery, prompt_digest
        self._answer, self._record = answer, record
        self._num_deaths, self._num_barren = 0.0, 0
        self._suspects: list[tuple[WorkerLink, bytes]] = []  # sources that a transfer failed from: dead, perhaps

    @property
    def faulty(self) -> set[bytes]:
        """Workers to take no KV from: one that drains gives away what it holds."""
        return self.avoid - self._leaving

    def judge(self, event: RequestEvent, before: Phase, subject, trial: Trial) -> BatonError:
        """What to say if nobody can take over. Raises it where nobody should."""
        error, blamed, worker_id = self._failure(event, before, subject, trial)
        self._num_deaths += _share_of_death(event, before, subject, trial)
        self._num_barren = 1 if trial.has_stepped else self._num_barren + 1
        self._note(event, before, subject, trial, error, blamed)
        self.avoid.add(worker_id)
        if _is_fault(before, subject, error):
            blamed.note_failure(f"{event.value} while {before.value}")
        if is_draining(subject):
            self._leaving |= {worker_id}
        if error.code in _FINAL_CODES or error.reason in _FINAL_REASONS:
            raise error
        num_dead = sum(link.worker_id != worker_id for link, worker_id in self._suspects)
        if self._num_deaths + num_dead >= _MAX_DEATHS:
            self._recovery.quarantine(self._prompt_digest)
            raise poison("two workers died with this request in their hands")
        if self._num_barren >= MAX_BARREN:
            raise error
        if self._num_barren > 1 or not _is_worker_gone(subject):  # whoever loses a worker may go on elsewhere, once
            self._recovery.retry(error)
        return error

    def _failure(self, event, before, subject, trial: Trial) -> tuple[BatonError, WorkerLink, bytes]:
        of_prefill = event in (RequestEvent.PREFILL_ENDED, RequestEvent.PREFILL_FAILED, RequestEvent.PREFILL_LOST)
        of_prefill |= event is RequestEvent.SILENCE and before is Phase.PREFILLING
        leg, role = (trial.prefill, "prefill") if of_prefill else (trial.decode, "decode")
        blamed, worker_id = leg.link, leg.worker_id
        if isinstance(subject, pb.Ended) and subject.code:
            error = from_code(subject.code, subject.message, reason=subject.reason or None)
            giver = trial.source or trial.holder
            if not of_prefill and giver and subject.reason in _KV_REASONS:
                blamed, worker_id = giver, giver.worker_id
                if before is Phase.FETCHING and trial.prefill is not None:
                    self._suspects.append((blamed, trial.prefill.worker_id))
            return error, blamed, worker_id
        silent = "it ended early" if subject else "it does not answer"
        what = subject.reason if isinstance(subject, Lost) else silent
        sent = f" after {self._answer.num_output_tokens} tokens" if self._answer.begun else ""
        reason = f"{role.upper()}_WORKER_LOST"
        return Unavailable(f"{role} worker lost{sent}: {what}", retry_after_s=1.0, reason=reason), blamed, worker_id

    def _note(self, event, before, subject, trial: Trial, error: BatonError, blamed: WorkerLink) -> None:
        is_told = isinstance(subject, pb.Ended) and bool(subject.code)
        sent, self._record.phase = self._answer.num_output_tokens, before.value
        self._record.failures.append(
            Failure(before.value, event.value, trial.phase_at, now(), blamed.name, error.reason, is_told, sent)
        )


def is_draining(subject) -> bool:
    """The worker goes, and has ended the request for that alone."""
    return isinstance(subject, pb.Ended) and subject.reason == "DRAINING"


def _is_fault(before: Phase, subject, error: BatonError) -> bool:
    """Of a worker, whatever the request: no answer to what it was asked, or an end without a reason."""
    if isinstance(subject, pb.Ended):
        is_own = error.code in _FAULTY_CODES and error.reason != "STEP_FAILED"  # that may be the request's
        return not subject.code or error.reason == "ENGINE_FAILED" or is_own
    return before in (Phase.ADMITTING, Phase.PREFILLING)


def _is_worker_gone(subject) -> bool:
    is_stalled = isinstance(subject, pb.Ended) and subject.reason == "STALLED"
    return isinstance(subject, Lost) or is_draining(subject) or is_stalled


def _share_of_death(event: RequestEvent, before: Phase, subject, trial: Trial) -> float:
    """Only if the request was being computed there, and no step of it came to an end."""
    if isinstance(subject, Lost):
        share = 1.0
    else:
        share = _DEADLY.get(subject.reason, 0.0) if isinstance(subject, pb.Ended) else 0.0
    if event in (RequestEvent.PREFILL_LOST, RequestEvent.PREFILL_FAILED):
        return share * (before in (Phase.PREFILLING, Phase.FETCHING))
    is_local_prefill = before is Phase.PREFILLING and trial.source is None
    return share * (not trial.has_stepped and (trial.is_decoding or is_local_prefill))
