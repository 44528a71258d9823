"""Actions that build the answer, from the first tokens until it is complete."""

from baton.protocol import KV_TRANSFER_FAILED
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Tokens
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence
from gateway.request.request_state import RequestState


def begin_answer(request: RequestContext, event: Occurrence[pb.Done]) -> None:
    """Add the first tokens to the answer, and begin to decode. Raises Diverged and InvalidRequest."""
    done, attempt, answer = event.payload, request.attempt, request.answer
    request.leave_queue()
    request.queue_wait.note_running()
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


def add_tokens(request: RequestContext, event: Occurrence[Tokens]) -> None:
    """Add tokens to the answer. Raises Diverged and InvalidRequest."""
    tokens = event.payload
    request.attempt.has_stepped = True
    request.answer.push(tokens.choice, tokens.first_index, tokens.token_ids, tokens.logprobs, tokens.finish_reason)


def expect_report(request: RequestContext, event: Occurrence[None]) -> RequestState | None:
    """Wait for the decode worker's report of what it measured, or end the request if it decoded nothing."""
    decode = request.attempt.decode
    if not request.attempt.is_decoding:
        decode.close(is_answered=True)
        return RequestState.ENDED  # the first tokens were the last
    if request.answer.ended_here:
        decode.finish()
    return None


def _record_prefill(request: RequestContext, done: pb.Done) -> None:
    record, attempt = request.record, request.attempt
    num_cached_tokens = min(done.num_cached_tokens, len(attempt.spec.token_ids))
    if not request.answer.has_begun:
        record.measured.queue_s, record.measured.prefill_s = done.queue_s, done.prefill_s
        record.measured.prefill_slot_s, record.measured.prefill_block_s = done.waits.place_s, done.waits.block_s
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
