"""The path of one request: validated message -> tokens -> span hashes -> index -> workers -> answer."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.protocol import CONSTRAINTS, PROMPT_LOGPROBS, adapter_feature
from baton.service.clock import now
from baton.service.errors import AlreadyExists, Cancelled, DeadlineExceeded, InvalidRequest
from baton.service.observe.core_wait import EventLoopWatch, LoopDelay, PathDelay
from baton.service.security.exposure import is_loopback
from baton.service.slo import Slo
from baton.v1 import inference_pb2 as pb
from gateway.answer.answer import Answer, Emit
from gateway.answer.answer_planner import AnswerPlan, AnswerPlanner
from gateway.answer.tool_schema_fallback import ToolSchemaFallback
from gateway.attempts.retry_throttle import RetryThrottle, prompt_digest
from gateway.config.served_model import ServedModel
from gateway.fleet.model_fleet import ModelFleet
from gateway.link.worker_link import WorkerLink
from gateway.orchestration.machine import RequestMachine
from gateway.orchestration.request_context import PreparedRequest, RequestContext
from gateway.prefix.prefix_hashes import PrefixHashes
from gateway.prefix.prefix_index import PrefixIndex
from gateway.queue.admission import AdmissionControl
from gateway.queue.quotas import Reservation
from gateway.queue.waiting_queue import QueuedRequest, WaitingQueues, rank
from gateway.request.answer_length import USUAL_TOKENS, resolve_max_tokens
from gateway.request.request_record import RequestRecord
from gateway.request.request_spec import SpecBuilder
from gateway.request.validation import ValidatedRequest, check_input, check_num_tokens, check_token_ids
from gateway.routing.routing import RoutingRequest
from gateway.text.text_work import TextWork

_UNREAD_S = 0.1  # how long after the deadline a write is ended; every other wait ends at the deadline by itself
_SUPERSEDE_S = 1.0  # the longest wait for the end of a superseded stream
_LOOP_TURNS = 3  # turns of the event loop that a write takes if the client reads without delay
_OUTPUT_SHARE = 0.02  # weight of one answer in the moving mean of all answers' lengths
CLIENT_ENDS = (asyncio.CancelledError, Cancelled, DeadlineExceeded)  # a client left, or gave too little time
_NO_FEATURES: frozenset[str] = frozenset()
_text_numbers = itertools.count()  # shared by all models, since they share one admission

RecordItl = Callable[
    [float], None
]  # records an inter-token latency: seconds per token between two messages of a choice


@dataclass
class Pipeline:
    """Serve the requests for one model, with the parts that they share. Belongs to the event loop.

    `admission` and `running` are shared by all models."""

    fleet: ModelFleet
    index: PrefixIndex
    prefix_hashes: PrefixHashes
    text: TextWork
    planner: AnswerPlanner
    admission: AdmissionControl
    queues: WaitingQueues
    max_queue_wait_s: float
    itl_recorder_for: Callable[[RequestRecord], RecordItl]
    slo_classes: Mapping[str, Slo]
    running: dict[str, RequestMachine]  # by key_id
    loop_watch: EventLoopWatch
    retry_throttle: RetryThrottle = field(default_factory=RetryThrottle)
    mean_output: float = 64.0  # moving mean over recent answers: tokens of the longest choice

    async def serve(
        self, validated: ValidatedRequest, model: ServedModel, deadline: float, record: RequestRecord, emit: Emit
    ) -> None:
        """Answer one request, and release everything that it held on workers, however it ends. Raises BatonError."""
        key_id = validated.key_id
        if validated.resume_from:
            await self._supersede(key_id)
        self.check_free(validated)
        machine: RequestMachine | None = None
        reservation = self.admission.enter(key_id, record.tenant, validated.num_choices, model.name)
        try:
            # A function of its own, so that its local variables are freed: this frame's live as long as the stream.
            request = await self._prepare(validated, model, deadline, record, emit, reservation)
            del validated
            machine = self.running[key_id] = RequestMachine(request)
            try:
                # Every wait in there ends at the deadline by itself, except for writes to a client that does not read.
                async with asyncio.timeout(None) as timeout:
                    request.mailbox.timer.set_timeout(timeout, deadline + _UNREAD_S)
                    await machine.run()
                    _note_waits(request, self.loop_watch.delay)
                    request.mailbox.timer.arm()
                    await request.answer.finish(record.num_cached_tokens, record.measured)
            except TimeoutError:
                if machine.is_superseded:
                    raise Cancelled("the client continues in another stream, and did not read this one") from None
                raise DeadlineExceeded("the deadline passed while the client did not read") from None
            finally:
                machine.close()
                self.running.pop(key_id, None)
                request.note_output()
                self._note_end(request.answer, record)
        except CLIENT_ENDS:
            if machine is not None and machine.request.is_prompt_taken and not record.num_charged_tokens:
                reservation.settle(record.num_prompt_tokens, now())
            raise
        finally:
            self.admission.leave(key_id, reservation, record.num_charged_tokens)
            if machine is not None:
                machine.note_gone()

    def check_free(self, validated: ValidatedRequest) -> None:
        """Raise AlreadyExists if another request of the tenant has the same id."""
        if validated.key_id in self.admission.key_ids:
            raise AlreadyExists(f"request_id {validated.request_id} is in use", reason="REQUEST_ID_IN_USE")

    async def _supersede(self, key_id: str) -> None:
        """End the earlier stream of a request that its client resumes, and wait up to _SUPERSEDE_S until it is gone.

        The client has lost that stream, but this gateway may not have noticed yet."""
        if (earlier := self.running.get(key_id)) is not None:
            gone = earlier.supersede()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SUPERSEDE_S):
                    await gone.wait()

    async def _prepare(
        self,
        validated: ValidatedRequest,
        model: ServedModel,
        deadline: float,
        record: RequestRecord,
        emit: Emit,
        reservation: Reservation,
    ) -> RequestContext:
        """Tokenize the prompt, pay for it, and return the request with everything that its way through workers needs.

        Raises BatonError, also for a prompt that is quarantined because workers died of it."""
        validated, prompt_ids, plan = await self._tokenize(validated, model, deadline, record)
        max_tokens = resolve_max_tokens(validated, len(prompt_ids), model)
        # The messages are not needed any more, and their objects may be 40 times as large as their text.
        validated = record.validated = replace(validated, prompt=validated.prompt._replace(messages=None))
        record.stamps.tokenized = now()
        self._check_wait(validated, record, max_tokens, deadline)
        num_ahead = max_tokens if validated.max_tokens is not None else min(max_tokens, USUAL_TOKENS)
        reservation.reserve(len(prompt_ids) + validated.num_choices * num_ahead, now())
        if num_ahead < max_tokens:
            emit = _paying(emit, reservation, len(prompt_ids))
        await self.fleet.await_identity(deadline)
        specs = SpecBuilder(
            validated, prompt_ids, max_tokens, self.prefix_hashes, record.tenant, record.context, deadline
        )
        matches = await self.index.lookup(specs.reusable_spans)
        answer = Answer(
            validated, len(prompt_ids), max_tokens, plan, record.stamps, emit, self.itl_recorder_for(record)
        )
        if (validated.echo or validated.echo_token_ids) and not any(validated.resume_from):
            answer.prompt = pb.EchoedPrompt(token_ids=prompt_ids)
            if validated.echo:
                answer.prompt.text = validated.prompt.text or await self.text.decode(
                    prompt_ids, record.tenant, deadline
                )
        digest = prompt_digest(record.tenant, prompt_ids)
        self.retry_throttle.begin(digest)
        is_resumed = bool(validated.resume_from) and not validated.asks_for_prompt_logprobs
        prepared = PreparedRequest(specs, matches, deadline, digest, is_resumed)
        return RequestContext(
            self.fleet.router, self.queues, self.retry_throttle, answer, record, prepared, self.max_queue_wait_s
        )

    async def _tokenize(
        self, validated: ValidatedRequest, model: ServedModel, deadline: float, record: RequestRecord
    ) -> tuple[ValidatedRequest, Sequence[int], AnswerPlan]:
        """Return the request with the constraint that its answer needs, the prompt's token ids, and the plan by which
        the answer is read. Raises BatonError."""
        prompt = validated.prompt
        if prompt.text is not None and validated.suffix:
            prompt_ids = await self.text.infill(prompt.text, validated.suffix, model.context, record.tenant, deadline)
            if not validated.ignore_eos:
                validated = replace(validated, stop_token_ids=validated.stop_token_ids | self.text.infilling_ends)
        else:
            prompt_ids = await self.text.encode(prompt, model.context, record.tenant, deadline)
        record.num_prompt_tokens = len(prompt_ids)
        constraint = validated.constraint
        if constraint is not None:
            constraint = await self.text.check_constraint(constraint, record.tenant, deadline)
        fallback = ToolSchemaFallback(self.planner, self.text, record.tenant, deadline)
        plan = await fallback.plan_for(prompt.messages, prompt_ids, constraint)
        if plan.constraint != validated.constraint:
            validated = replace(validated, constraint=plan.constraint)
        return validated, prompt_ids, plan

    def _note_end(self, answer: Answer, record: RequestRecord) -> None:
        """Record why each choice of the answer finished, and count its length in the mean of all answers."""
        record.finish_reasons = answer.finish_reasons
        if answer.is_finished:
            self.mean_output += _OUTPUT_SHARE * (answer.num_longest - self.mean_output)

    def _check_wait(self, validated: ValidatedRequest, record: RequestRecord, max_tokens: int, deadline: float) -> None:
        """Record the request as routing and queues see it. Raises InvalidRequest if no worker could hold it, and
        Overloaded if it would have to wait for too long."""
        num_tokens, slo = record.num_prompt_tokens, self.slo_of(validated)
        num_output, num_choices = min(self.mean_output, max_tokens), validated.num_choices
        record.routing_request = RoutingRequest(
            num_tokens=num_tokens,
            max_len=num_tokens + max_tokens,
            num_output=num_output,
            slo=slo,
            num_choices=num_choices,
            tenant=record.tenant,
            features=features_of(validated),
            adapter=validated.adapter,
        )
        self.fleet.check_fits(record.routing_request)
        record.queued = QueuedRequest(
            rank=rank(record.stamps.received, slo, validated.priority),
            num_tokens=num_tokens,
            slo=slo,
            max_wait_s=self.max_queue_wait_s,
            deadline=deadline,
            tenant=record.tenant,
            num_expected=num_choices * num_output,
        )
        self.queues.check(record.queued, self.fleet.router.prefill_s(num_tokens))

    def slo_of(self, validated: ValidatedRequest) -> Slo:
        """Return the SLO of the class that the request names, or an empty one if it names none.

        A class that is only assumed is counted in metrics, but is no reason to refuse the request."""
        return self.slo_classes[validated.slo_class] if validated.has_slo_class else Slo()

    async def tokenize(
        self, request: pb.TokenizeRequest, model: ServedModel, tenant: str, deadline: float
    ) -> Sequence[int]:
        """Return the token ids of a text; the call is admitted and charged like a prompt. Raises BatonError."""
        prompt = check_input(request, model)
        with self._counted(tenant, model, request.ByteSize()) as reservation:
            try:
                token_ids = await self.text.encode(prompt, model.context, tenant, deadline)
            except InvalidRequest:
                reservation.settle(0, now())
                raise
            reservation.settle(len(token_ids), now())
            return token_ids

    async def detokenize(self, token_ids: Sequence[int], model: ServedModel, tenant: str, deadline: float) -> str:
        """Return the text of token ids; the call is admitted and charged like a prompt of these tokens. Raises
        BatonError."""
        check_num_tokens(len(token_ids), model, "token_ids")
        if token_ids:
            check_token_ids(token_ids, model.vocab_size, "token_ids")
        with self._counted(tenant, model, len(token_ids)):
            return await self.text.decode(token_ids, tenant, deadline)

    @contextlib.contextmanager
    def _counted(self, tenant: str, model: ServedModel, num_tokens: int) -> Iterator[Reservation]:
        """Admit a call that no worker sees as a request, and charge it. Raises Overloaded.

        `num_tokens` is an upper bound of its tokens. The call is charged for all of them unless it settles the
        reservation before, since the work of a client that hangs up is done nevertheless."""
        key_id = f"text.{next(_text_numbers)}"  # distinct from every request's key_id
        reservation = self.admission.enter(key_id, tenant, model=model.name)
        try:
            reservation.reserve(num_tokens, now())
            yield reservation
        finally:
            self.admission.leave(key_id, reservation, num_tokens)


def _paying(emit: Emit, reservation: Reservation, num_prompt_tokens: int) -> Emit:
    """Return a function that charges the tenant for tokens beyond the reservation, and then calls `emit`.

    Nobody knows how much to reserve for an answer that may become as long as the context. The function is no coroutine
    around `emit`, since each message would have to run through it."""
    num_paid = num_prompt_tokens

    def pay_and_emit(message: pb.GenerateResponse) -> Awaitable[None]:
        nonlocal num_paid
        num_paid += len(message.token_ids)
        reservation.cover(num_paid, now())
        return emit(message)

    return pay_and_emit


def features_of(validated: ValidatedRequest) -> frozenset[str]:
    """Return the features that workers must have for this request."""
    if validated.constraint is None and not validated.asks_for_prompt_logprobs and not validated.adapter:
        return _NO_FEATURES  # most requests share one set
    asked = {
        CONSTRAINTS: validated.constraint is not None,
        PROMPT_LOGPROBS: validated.asks_for_prompt_logprobs,
        adapter_feature(validated.adapter): bool(validated.adapter),
    }
    return frozenset(feature for feature, is_asked in asked.items() if is_asked)


def _note_waits(request: RequestContext, loop: LoopDelay) -> None:
    """Record what the request waited for, and how late workers, this event loop and the network are at present."""
    measured, link = request.record.measured, request.attempt.decode.link
    measured.queued_s = dict(request.queue_wait.waited_s)
    measured.path = path_to(link, loop)
    measured.decode_core_wait = link.load.core_wait
    answer = request.answer
    measured.unread_s = max(0.0, answer.slow_writes_s - _LOOP_TURNS * answer.num_slow_writes * sum(loop))


def path_to(link: WorkerLink, loop: LoopDelay) -> PathDelay:
    """Return how late messages between this event loop and a worker are at present."""
    network_s = 0.0 if is_loopback(link.address) else max(0.0, link.clock.round_trip_s / 2 - sum(loop))
    return PathDelay(loop, network_s)
