"""The path of one call for embeddings or scores: validated prompts -> tokens -> workers -> vectors."""

import itertools
from collections.abc import Sequence

from baton.protocol import POOLING
from baton.service.clock import now
from baton.service.errors import InvalidRequest
from baton.service.observe.core_wait import LoopDelay
from baton.service.observe.telemetry import format_traceparent
from baton.service.slo import Slo
from gateway.attempts.retry_throttle import prompt_digest
from gateway.config.served_model import ServedModel
from gateway.orchestration.pipeline import CLIENT_ENDS, Pipeline, features_of, path_to
from gateway.pooling.pooling_request import MAX_AT_ONCE, PooledPrompt, PoolingRequest, PromptParts, pool_all
from gateway.queue.quotas import Reservation
from gateway.queue.waiting_queue import QueuedRequest, rank
from gateway.request.answer_length import room_behind
from gateway.request.prompt_batch import PromptBatch
from gateway.request.request_record import RequestRecord
from gateway.request.request_spec import pooled_spec
from gateway.request.timing import note_pooling_phases
from gateway.request.validation import ValidatedRequest
from gateway.routing.routing import RoutingRequest


class PoolingPipeline:
    """Get the vectors of prompts from workers, with the parts of the model's Pipeline. Belongs to the event loop."""

    def __init__(self, answers: Pipeline):
        self._answers = answers

    async def pool_prompts(
        self, batch: PromptBatch, model: ServedModel, deadline: float, record: RequestRecord
    ) -> list[Sequence[float]]:
        """Return the vector that a prefill worker makes of each prompt of one call. Raises BatonError."""
        first, admission = batch.prompts[0], self._answers.admission
        record.validated = first
        self._answers.check_free(first)
        most = admission.quotas.max_concurrent(record.tenant, model.name)
        num_at_once = min(len(batch.prompts), MAX_AT_ONCE, most or MAX_AT_ONCE)
        reservation, requests = admission.enter(first.key_id, record.tenant, num_at_once, model.name), []
        try:
            requests = await self._requests(batch, model, deadline, record, reservation)
            pooled = await pool_all(requests, num_at_once)
            _note_waits(pooled, record, self._answers.loop_watch.delay)
            record.stamps.first_sent = record.stamps.last_sent = now()
            return [each.pooled for each in pooled]
        except CLIENT_ENDS:
            reservation.settle(sum(request.num_accepted_tokens for request in requests), now())
            raise
        finally:
            admission.leave(first.key_id, reservation, sum(request.num_prefilled_tokens for request in requests))

    async def _requests(
        self, batch: PromptBatch, model: ServedModel, deadline: float, record: RequestRecord, reservation: Reservation
    ) -> list[PoolingRequest]:
        """Tokenize the prompts, pay for them, and return a PoolingRequest for each. Raises BatonError."""
        answers, first = self._answers, batch.prompts[0]
        all_ids = await self._tokenize(batch, model, deadline, record)
        num_tokens, slo = sum(map(len, all_ids)), answers.slo_of(first)
        self._check_wait(first, num_tokens, slo, deadline, record)
        reservation.reserve(num_tokens, now())
        await answers.fleet.await_identity(deadline)
        parts = PromptParts(
            answers.fleet.router, answers.queues, answers.retry_throttle, record, first.key_id, deadline
        )
        mark, traceparent = answers.prefix_hashes.mark(record.tenant), format_traceparent(record.context)
        return [
            PoolingRequest(
                parts,
                pooled_spec(validated, ids, batch.pooling, mark, traceparent),
                _routing_request(validated, len(ids), slo, record.tenant),
                record.queued._replace(num_tokens=len(ids)),
                prompt_digest(record.tenant, ids),
            )
            for validated, ids in zip(batch.prompts, all_ids, strict=True)
        ]

    async def _tokenize(
        self, batch: PromptBatch, model: ServedModel, deadline: float, record: RequestRecord
    ) -> list[Sequence[int]]:
        """Return the token ids of each prompt. Raises BatonError, which says where in the call a wrong prompt is."""
        all_ids, record.num_prompt_tokens = [], 0
        for index, validated in enumerate(batch.prompts):
            try:
                prompt_ids = await self._answers.text.encode(
                    validated.prompt, model.context, record.tenant, deadline, is_data=True
                )
                room_behind(validated, len(prompt_ids), model)
            except InvalidRequest as error:
                raise batch.error_of(index, error) from None
            all_ids.append(prompt_ids)
            record.num_prompt_tokens += len(prompt_ids)
        record.stamps.tokenized = now()
        return all_ids

    def _check_wait(
        self, first: ValidatedRequest, num_tokens: int, slo: Slo, deadline: float, record: RequestRecord
    ) -> None:
        """Record the call, with `num_tokens` in all its prompts, as queues see it. Raises Overloaded if it would have
        to wait for too long."""
        record.queued = QueuedRequest(
            rank=rank(record.stamps.received, slo, first.priority),
            num_tokens=num_tokens,
            slo=slo,
            max_wait_s=self._answers.max_queue_wait_s,
            deadline=deadline,
            tenant=record.tenant,
        )
        idle_ttft_s = self._answers.fleet.router.prefill_s(num_tokens)
        record.queued.check_wait(self._answers.queues.prefill.wait_s(record.queued), idle_ttft_s)


def _routing_request(validated: ValidatedRequest, num_tokens: int, slo: Slo, tenant: str) -> RoutingRequest:
    return RoutingRequest(
        num_tokens=num_tokens,
        max_len=num_tokens,
        num_output=0.0,
        slo=slo,
        num_choices=1,
        tenant=tenant,
        features=frozenset((POOLING,)) | features_of(validated),
        adapter=validated.adapter,
    )


def _note_waits(pooled: Sequence[PooledPrompt], record: RequestRecord, loop: LoopDelay) -> None:
    """Record what the call waited for: the longest wait of its prompts in a queue, and delays of the last worker."""
    measured, link = record.measured, pooled[-1].link
    note_pooling_phases([each.stamps for each in pooled], record.stamps, measured)
    for bottleneck, waited_s in itertools.chain.from_iterable(each.waited_s.items() for each in pooled):
        measured.queued_s[bottleneck] = max(waited_s, measured.queued_s.get(bottleneck, 0.0))
    measured.path, measured.prefill_core_wait = path_to(link, loop), link.load.core_wait
