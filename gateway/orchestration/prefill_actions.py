"""Actions that have the prompt read, and its KV moved to the decode worker."""

from collections.abc import Sequence
from functools import partial

from baton.service.clock import now
from baton.service.errors import NoWorker
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_link import WorkerLink
from gateway.orchestration.credit_actions import (
    drop_decode,
    note_refusal,
    queue_for_credit,
    queue_for_worker,
)
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence
from gateway.request.request_state import RequestState
from gateway.routing.routing import AWAITS_ADAPTER, NEVER_HERE, SHORT_TOKENS


def begin_prefill(request: RequestContext, event: Occurrence[pb.Granted]) -> RequestState | None:
    """Have the prompt read, since credit is granted. Raises NoWorker and Overloaded."""
    attempt, record = request.attempt, request.record
    attempt.num_granted_tokens = min(event.payload.num_cached_tokens, len(attempt.spec.token_ids))
    record.stamps.granted = record.stamps.granted or now()
    request.leave_queue()
    if attempt.has_lost_decode_worker:  # Lost is next
        return RequestState.AWAITING_PREFILL
    if _is_rest_short(request):
        attempt.prefill_link = None
    if attempt.prefill_link is not None and not request.queues.prefill.is_open_to(record.tenant):
        request.queue_wait.join(request.queues.prefill)
        return RequestState.AWAITING_PREFILL
    return ask_for_prefill(request, event)


def ask_for_prefill(request: RequestContext, event: Occurrence[object]) -> RequestState | None:
    """Have the chosen prefill worker read the prompt, or the decode worker if it needs no other.

    If no worker that serves can read it, give the credit back and wait for one. Raises NoWorker and Overloaded."""
    attempt, router = request.attempt, request.router
    if attempt.has_lost_decode_worker:  # Lost is next
        return None
    if not request.answer.has_begun:
        request.record.stamps.prefill_sent = now()
    if attempt.prefill_link is not None and not router.is_usable(attempt.prefill_link):
        try:
            attempt.prefill_link = router.prefill_for(attempt.decode.link)
        except NoWorker as error:
            drop_decode(request)
            request.queue_wait.leave(served=False)
            return queue_for_worker(request, error)
    attempt.load.count_prefill(attempt.prefill_link or attempt.decode.link, request.record.decision.prefill_s)
    if attempt.prefill_link is None:
        request.leave_queue()
        is_retry = request.record.num_attempts > 1  # other workers may hold the prefix that the lost worker held
        holder = router.prefix_holder_for(attempt.decode.link) if is_retry else None
        on_offer = partial(router.note_fetch_started, holder, attempt.decode.link, attempt.chosen_at)
        attempt.prefill_on_decode_worker(holder, _spans_held(request, holder), on_offer)
    else:
        holder = router.prefix_holder_for(attempt.prefill_link)
        on_offer = partial(router.note_fetch_started, holder, attempt.prefill_link, now())
        num_matched = router.num_matched_tokens(attempt.prefill_link)
        attempt.prefill_on_prefill_worker(holder, _spans_held(request, holder), num_matched, on_offer)
    return None


def queue_for_prefill(request: RequestContext, event: Occurrence[pb.Refused]) -> RequestState | None:
    """Ask the next prefill worker, or wait in a queue once all have refused. Raises NoWorker and Overloaded."""
    refused, router = event.payload, request.router
    if request.attempt.prefill is None:  # the decode worker refused: its key has ended since it was granted
        queue_for_credit(request, event)
        return RequestState.AWAITING_CREDIT
    note_refusal(request, request.attempt.prefill.link, refused, request.queues.prefill)
    request.attempt.load.drop_prefill()
    request.attempt.drop_prefill()
    if refused.reason in NEVER_HERE or router.has_untried("prefill"):
        request.post_capacity()  # if no prefill worker can read the prompt, the decode worker does
        return None
    router.forget_refusals()
    if refused.reason in AWAITS_ADAPTER:
        request.queue_wait.join_for_worker(request.queues.prefill_start)
    else:
        request.queue_wait.join(request.queues.prefill)
    return None


def fetch(request: RequestContext, event: Occurrence[pb.Accepted]) -> None:
    """Have the decode worker pull the KV while the prefill worker reads the prompt."""
    request.leave_queue()
    request.queue_wait.note_running()
    attempt = request.attempt
    request.router.note_fetch_started(attempt.kv_source, attempt.decode.link, attempt.chosen_at)
    attempt.fetch(event.payload)


def note_prefix(request: RequestContext, event: Occurrence[pb.Fetched]) -> None:
    """Have the decode worker read the prompt behind the prefix that it has pulled, or, if a prefill worker reads the
    prompt, note that all KV has arrived."""
    if request.attempt.prefill_link is None:
        request.router.note_fetch_done(request.attempt.kv_source, request.attempt.decode.link)
        request.attempt.prefill_rest()
    else:
        note_fetched(request, event)


def note_fetched(request: RequestContext, event: Occurrence[pb.Fetched]) -> None:
    """Note that the decode worker has all KV of the prompt."""
    request.attempt.note_fetched()
    request.router.note_fetch_done(request.attempt.kv_source, request.attempt.decode.link)
    request.record.measured.transfer_s = event.payload.transfer_s
    request.record.measured.after_last_ready_s = event.payload.after_last_ready_s


def _is_rest_short(request: RequestContext) -> bool:
    """Return whether a draining worker holds nearly all of the prompt, so that the decode worker can pull that prefix
    and read the rest itself."""
    if request.record.num_attempts == 1:
        return False
    attempt, router = request.attempt, request.router
    holder = router.prefix_holder_for(attempt.decode.link)
    is_leaving = holder is not None and not holder.is_serving
    return is_leaving and len(attempt.spec.token_ids) - router.num_matched_tokens(holder) <= SHORT_TOKENS


def _spans_held(request: RequestContext, holder: WorkerLink | None) -> Sequence[bytes]:
    """Return the names of the prompt's leading spans that `holder` holds."""
    return request.attempt.spec.span_hashes[: request.router.num_matched_spans(holder)] if holder else []
