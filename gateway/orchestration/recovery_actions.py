"""Actions after a worker has failed, stalled or lost its session, and actions for a client that resumes."""

from typing import Any

from google.rpc import code_pb2

from baton.service.clock import now
from baton.v1 import worker_pb2 as pb
from gateway.attempts.failure_limits import is_draining
from gateway.attempts.reattach import MAX_ASKED, AttachReply, Reattach
from gateway.attempts.suspected_deaths import STALLED
from gateway.link.mailbox import Lost, Stalled
from gateway.orchestration.credit_actions import ask_for_credit
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence, RequestEvent
from gateway.request.request_state import RequestState


def try_again(request: RequestContext, event: Occurrence[Any]) -> RequestState:
    """Ask for credit in a new attempt. Raises BatonError if no other attempt is allowed."""
    attempt, choices = request.attempt, request.answer.choices
    request.failures.judge(event, attempt)
    if is_draining(event.payload) and attempt.is_decoding and len(choices) == 1:
        request.router.note_holder(attempt.decode.worker_id, len(choices[0].token_ids))
    request.queue_wait.leave(served=False)
    attempt.close()
    request.begin_attempt()
    return ask_for_credit(request, event)


def leave_stalled(request: RequestContext, event: Occurrence[Stalled]) -> RequestState | None:
    """Try again if another worker could do the work; otherwise wait, since the stalled worker may recover. Raises
    BatonError."""
    is_prefill, router = event.kind is RequestEvent.PREFILL_STALLED, request.router
    may_prefill = is_prefill and router.may_prefill_locally and router.has_worker("decode")
    if not may_prefill and not router.has_worker("prefill" if is_prefill else "decode", trusted_only=True):
        return None
    kind = RequestEvent.PREFILL_FAILED if is_prefill else RequestEvent.DECODE_FAILED
    ended = pb.Ended(code=code_pb2.UNAVAILABLE, reason=STALLED, message="its engine does not step")
    return try_again(request, event._replace(kind=kind, payload=ended))


def doubt_fetch(request: RequestContext, event: Occurrence[Lost | Stalled]) -> None:
    """Give the fetch from the lost or stalled prefill worker a moment to end."""
    request.attempt.doubt_fetch()


# ---- attaching ----


def find_sequence(request: RequestContext, event: Occurrence[None]) -> RequestState | None:
    """Ask decode workers for the sequence that a client resumes, since one may still have it. Raises BatonError."""
    request.make_spec()
    choices = request.answer.choices
    # From index 0: the text is made from all tokens, although the client has some of them.
    request.reattach = _new_reattach(request, [0] * len(choices))
    request.reattach.ask(request.router.decode_links(MAX_ASKED), sum(choice.num_received for choice in choices))
    return _restart_if_exhausted(request, event)


def begin_reattach(request: RequestContext, event: Occurrence[Lost]) -> RequestState | None:
    """Wait for the worker whose session was lost, since it may still have the sequence. Raises BatonError."""
    attempt = request.attempt
    request.lost = event._replace(since=now())
    attempt.decode.close()
    next_index = [len(choice.token_ids) for choice in request.answer.choices]
    request.reattach = _new_reattach(request, next_index, previous_attempt=attempt.decode.key[1])
    if attempt.is_decoding:
        request.reattach.wait_for(attempt.decode.link, attempt.decode.worker_id)
    return _restart_if_exhausted(request, event)


def send_attach(request: RequestContext, event: Occurrence[AttachReply]) -> RequestState | None:
    """Send Attach to a worker whose session is up again. Raises BatonError."""
    request.reattach.send_again(event.payload.leg)
    return _restart_if_exhausted(request, event)


def drop_reattach_leg(request: RequestContext, event: Occurrence[AttachReply]) -> RequestState | None:
    """Give up on a worker that does not have the sequence; wait for the others that were asked. Raises BatonError."""
    request.reattach.drop(event.payload.leg)
    return _restart_if_exhausted(request, event)


def resume_decoding(request: RequestContext, event: Occurrence[AttachReply]) -> None:
    """Continue the answer from the sequence that was found on a worker."""
    leg, granted = event.payload
    request.attempt.resume(request.reattach.settle_on(leg))
    request.reattach = request.lost = None
    request.record.note_attached(granted.num_tokens)


def start_over(request: RequestContext, event: Occurrence[Any]) -> RequestState:
    """Compute the sequence again in a new attempt, since no worker has it. Raises BatonError."""
    request.reattach.close()
    request.reattach, lost, request.lost = None, request.lost, None
    if lost is not None:
        return try_again(request, lost)
    request.attempt.spec = None
    if request.queues.credit.is_open_to(request.record.tenant):
        return ask_for_credit(request, event)
    request.queue_wait.join(request.queues.credit)
    return RequestState.AWAITING_CREDIT


def _new_reattach(request: RequestContext, next_index: list[int], previous_attempt: int = 0) -> Reattach:
    """Return a Reattach that has asked no worker yet.

    `next_index` is the index of the first wanted output token of each choice. `previous_attempt` is the attempt whose
    sequence is wanted; 0: of any attempt of the request."""
    attach = pb.Attach(
        previous_attempt=previous_attempt,
        next_index=next_index,
        fingerprint=request.attempt.fingerprint,
        traceparent=request.specs.traceparent,
    )
    return Reattach(request.answer.key_id, request.mailbox, attach, request.deadline)


def _restart_if_exhausted(request: RequestContext, event: Occurrence[Any]) -> RequestState | None:
    return start_over(request, event) if request.reattach.is_exhausted else None
