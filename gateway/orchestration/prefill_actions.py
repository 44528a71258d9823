"""Actions from asking a decode worker for credit until the first tokens arrive."""

from collections.abc import Sequence
from functools import partial

from baton.protocol import KV_TRANSFER_FAILED
from baton.service.clock import now
from baton.service.errors import NoWorker
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_link import WorkerLink
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence
from gateway.queue.waiting_queue import WaitingQueue
from gateway.request.request_state import RequestState
from gateway.routing.routing import AWAITS_ADAPTER, NEVER_HERE, SHORT_TOKENS, needs


def ask_for_credit(request: RequestContext, event: Occurrence[object]) -> RequestState:
    """Choose workers and send Admit. Raises NoWorker if no worker serves and none may come, Overloaded if the answer
    would be too late, and BatonError (POISON) if workers died of the prompt."""
    record, queues = request.record, request.queues
    if not request.limits.check_deaths():
        return _queue_for_worker(request, NoWorker("no worker was heard again"))
    try:
        placement = request.router.route()
    except NoWorker as error:
        return _queue_for_worker(request, error)
    request.failures.note_replaced()
    # A request that has waited in a queue is served, even if it will be late.
    if record.decision is None and not request.place.is_in_line:
        record.queued.check(placement.decision, queues.prefill.wait_s(record.queued))
    record.decision = placement.decision
    record.stamps.routed = record.stamps.routed or now()
    record.num_attempts += request.attempt.spec is None
    request.make_spec()
    request.attempt.prefill_link = placement.prefill
    # The decode worker of a later attempt first pulls the prefix that other workers hold.
    request.attempt.admit(placement.decode, prefills_on_admit=placement.prefill is None and record.num_attempts == 1)
    _count_prefill(request, placement.prefill or placement.decode)
    placement.decode.recent_load.add(placement.decision.decode_s, now())
    return RequestState.ADMITTING


def queue_for_credit(request: RequestContext, event: Occurrence[pb.Refused]) -> None:
    """Ask the next decode worker, or wait in a queue once all have refused. Raises NoWorker and Overloaded."""
    _note_refusal(request, request.attempt.decode.link, event.payload, request.queues.credit)
    _drop_decode(request)
    router = request.router
    if router.has_untried("decode"):
        request.call_room()
        return
    router.forget_refusals()
    if event.payload.reason in AWAITS_ADAPTER:
        request.place.join_for_worker(request.queues.decode_start)
    elif router.has_worker("decode"):
        request.place.join(request.queues.credit)
    else:
        message = f"no decode worker that serves can hold {needs(router.request)}"
        _queue_for_worker(request, NoWorker(message))


def begin_prefill(request: RequestContext, event: Occurrence[pb.Granted]) -> RequestState | None:
    """Have the prompt read, since credit is granted. Raises NoWorker and Overloaded."""
    attempt, record = request.attempt, request.record
    attempt.num_granted_tokens = min(event.payload.num_cached_tokens, len(attempt.spec.token_ids))
    record.stamps.granted = record.stamps.granted or now()
    request.leave_line()
    if attempt.has_lost_decode_worker:  # Lost is next
        return RequestState.AWAITING_PREFILL
    if _is_rest_short(request):
        attempt.prefill_link = None
    if attempt.prefill_link is not None and not request.queues.prefill.is_open_to(record.tenant):
        request.place.join(request.queues.prefill)
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
            _drop_decode(request)
            request.place.leave(served=False)
            return _queue_for_worker(request, error)
    _count_prefill(request, attempt.prefill_link or attempt.decode.link)
    if attempt.prefill_link is None:
        request.leave_line()
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
    _note_refusal(request, request.attempt.prefill.link, refused, request.queues.prefill)
    _count_prefill(request, None)
    request.attempt.drop_prefill()
    if refused.reason in NEVER_HERE or router.has_untried("prefill"):
        request.call_room()  # if no prefill worker can read the prompt, the decode worker does
        return None
    router.forget_refusals()
    if refused.reason in AWAITS_ADAPTER:
        request.place.join_for_worker(request.queues.prefill_start)
    else:
        request.place.join(request.queues.prefill)
    return None


def end_or_wait_longer(request: RequestContext, event: Occurrence[None]) -> None:
    """Wait longer if no worker serves and one is starting. Raises NoWorker if no worker came, and Overloaded if all
    workers are full."""
    router, failures = request.router, request.failures
    lacks_worker = failures.awaits_worker or not router.has_worker("decode")
    if not (lacks_worker and router.expects_worker() and request.place.wait_longer(router.max_start_wait_s)):
        failures.end_wait()
        end_full(request, event)


def end_full(request: RequestContext, event: Occurrence[None]) -> None:
    """End a request that has waited in a queue for too long. Raises Overloaded."""
    request.place.time_out()


def fetch(request: RequestContext, event: Occurrence[pb.Accepted]) -> None:
    """Have the decode worker pull the KV while the prefill worker reads the prompt."""
    request.leave_line()
    request.place.note_running()
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


def begin_answer(request: RequestContext, event: Occurrence[pb.Done]) -> None:
    """Add the first tokens to the answer, and begin to decode. Raises Diverged and InvalidRequest."""
    done, attempt, answer = event.payload, request.attempt, request.answer
    request.leave_line()
    request.place.note_running()
    for leg in (attempt.decode, attempt.prefill):
        if leg is not None:
            leg.num_prefill_tokens = 0
    _record_prefill(request, done)
    request.router.note_holder(attempt.prefilling_leg.worker_id)
    if done.HasField("pulled") and attempt.prefill is not None:
        _note_pulled(request, done.pulled)
    answer.set_prompt_logprobs(done.prompt_logprobs)
    for first in done.first_tokens:
        logprobs = [first.logprobs] if first.HasField("logprobs") else []
        answer.push(first.choice, len(attempt.output_ids), [first.token_id], logprobs, first.finish_reason)
    unfinished = [first for first in done.first_tokens if not answer.choices[first.choice].is_finished]
    for first in unfinished:
        first.finished, first.finish_reason = False, 0  # this gateway decides, not that worker
    attempt.start(unfinished)
    request.specs.forget_spans()


def _record_prefill(request: RequestContext, done: pb.Done) -> None:
    record, attempt = request.record, request.attempt
    num_cached_tokens = min(done.num_cached_tokens, len(attempt.spec.token_ids))
    if not request.answer.has_begun:
        record.measured.queue_s, record.measured.prefill_s = done.queue_s, done.prefill_s
        record.measured.prefill_place_s, record.measured.prefill_block_s = done.waits.place_s, done.waits.block_s
        record.measured.is_disaggregated = attempt.prefill is not None
        record.measured.prefill_core_wait = attempt.prefilling_leg.link.load.core_wait
        record.num_cached_tokens = num_cached_tokens
        attempt.prefilling_leg.link.note_prefill(record.num_prompt_tokens - num_cached_tokens, done.prefill_s)
        record.batch_size = attempt.decode.link.load.num_running + 1
    elif record.num_attempts > 1:
        record.num_reused_tokens += num_cached_tokens
        record.num_recomputed_tokens += len(attempt.spec.token_ids) - num_cached_tokens


def _note_pulled(request: RequestContext, pulled: pb.Pulled) -> None:
    """Note whether KV of the prefix holder arrived at the prefill worker.

    Other reasons why it did not, as an expired lease, say nothing of the connection between the two workers. Nothing
    is noted of a holder that is gone."""
    holder, taker = request.attempt.prefix_holder, request.attempt.prefill.link
    if not pulled.reason or pulled.num_tokens:
        request.router.note_fetch_done(holder, taker)
    elif pulled.reason == KV_TRANSFER_FAILED and holder is not None and holder.worker_id:
        request.router.note_fetch_failed(holder, taker, pulled.failure)


def _queue_for_worker(request: RequestContext, error: NoWorker) -> RequestState:
    """Wait in a queue for a worker that replaces a lost one, or that can hold the request. Raises the last failure, or
    `error` if there was none, if no worker may come."""
    request.failures.check_wait(error)
    if request.router.expects_worker():  # the time that a worker takes to start does not count as a wait for room
        request.place.wait_longer(request.router.max_start_wait_s)
    request.place.join_for_worker(request.queues.decode_start)
    return RequestState.AWAITING_CREDIT


def _count_prefill(request: RequestContext, link: WorkerLink | None) -> None:
    """Count the prefill as recent work of `link` only, before the worker reports it, since other requests choose
    workers meanwhile. None: every worker that was asked has refused."""
    attempt, prefill_s = request.attempt, request.record.decision.prefill_s
    if attempt.counted_prefill_link is not link:
        for each, seconds in ((attempt.counted_prefill_link, -prefill_s), (link, prefill_s)):
            if each is not None:
                each.recent_load.add(seconds, now())
        attempt.counted_prefill_link = link


def _drop_decode(request: RequestContext) -> None:
    """Close the decode leg, and subtract the request from the recent work of the chosen workers."""
    attempt = request.attempt
    _count_prefill(request, None)
    attempt.decode.link.recent_load.add(-request.record.decision.decode_s, now())
    attempt.drop_decode()


def _note_refusal(request: RequestContext, link: WorkerLink, refused: pb.Refused, queue: WaitingQueue) -> None:
    queue.refused_for = refused.reason
    request.router.note_refusal(link, refused)
    request.place.note_refusal(refused)


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
