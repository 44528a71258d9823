"""Get the vectors of prompts: ask one prefill worker after the other until one returns the vector, for several prompts
of a call at a time."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.protocol import DRAINING, GRANTS_POOLING
from baton.service.clock import now
from baton.service.codec import budget_ms
from baton.service.errors import DeadlineExceeded, NoWorker
from baton.v1 import worker_pb2 as pb
from gateway.attempts.answer_timeout import answer_timeout_s, gives_up
from gateway.attempts.attempt import new_key
from gateway.attempts.failure_limits import FINAL_CODES, FailureLimits, error_of
from gateway.attempts.retry_throttle import RetryThrottle
from gateway.attempts.tried_workers import TriedWorkers
from gateway.fleet.router import Router
from gateway.link.mailbox import Lost, Mailbox, Stalled
from gateway.link.worker_leg import WorkerLeg
from gateway.link.worker_link import WorkerLink
from gateway.queue.queue_wait import QueueWait
from gateway.queue.waiting_queue import QueuedRequest, WaitingQueues
from gateway.request.request_record import RequestRecord
from gateway.request.request_state import RequestState
from gateway.request.timing import PoolingStamps
from gateway.routing.routing import AWAITS_ADAPTER, RoutingRequest

MAX_AT_ONCE = 16  # prompts of one call that workers read at the same time
_DOUBT_POLL_S = 0.02  # between two looks whether a lost worker is back


class PromptParts(NamedTuple):
    """The parts that the prompts of one call share. `deadline`: time.monotonic()."""

    router: Router
    queues: WaitingQueues
    throttle: RetryThrottle
    record: RequestRecord
    key_id: str
    deadline: float


class PooledPrompt(NamedTuple):
    """The result of a prompt: its vector, the worker that read it, and how long that took."""

    pooled: Sequence[float]
    link: WorkerLink
    stamps: PoolingStamps
    waited_s: dict[str, float]  # seconds in queues, by what the queue waits for


class PoolingRequest:
    """One prompt for which a worker is to return a vector."""

    def __init__(
        self, parts: PromptParts, spec: pb.RequestSpec, routing: RoutingRequest, queued: QueuedRequest, digest: bytes
    ):
        """`digest` identifies the prompt if it must be quarantined because workers died of it. Raises BatonError if it
        is quarantined already."""
        self._parts, self._spec, self._routing = parts, spec, routing
        self._mailbox, self._has_capacity = Mailbox(), asyncio.Event()
        self._queue_wait = QueueWait(queued, self._has_capacity.set, queued.max_wait_s)
        self._tried, self._limits = TriedWorkers(), FailureLimits(parts.throttle, digest)
        self._awaits_adapter = False  # whether the last refusal was for an adapter that is not loaded yet
        # The prompt's tokens, once a worker has accepted it, and once one has read it.
        self.num_accepted_tokens = self.num_prefilled_tokens = 0
        parts.throttle.begin(digest)

    async def run(self) -> PooledPrompt:
        """Return what a worker made of the prompt; nothing of it is left on workers. Raises BatonError."""
        record, queue, begun = self._parts.record, self._parts.queues.prefill, now()
        record.stamps.routed = record.stamps.granted = record.stamps.routed or now()
        try:
            if not queue.is_open_to(record.tenant):
                await self._wait_for_room()
            while True:
                try:
                    link = self._parts.router.pooling_worker_for(self._routing, self._tried.exclusions)
                except NoWorker as error:
                    await self._wait_for_worker(error)
                    continue
                if link.worker_id in self._tried.refused:  # all workers have refused
                    self._tried.forget_refusals()
                    await self._wait_for_room()
                    continue
                leg = link.open(new_key(self._parts.key_id), self._mailbox, record.tenant)
                try:
                    sent = now()
                    if (done := await self._ask(leg)) is not None:
                        stamps = PoolingStamps.ended(begun, sent, now(), done)
                        return PooledPrompt(done.pooled, link, stamps, dict(self._queue_wait.waited_s))
                finally:
                    leg.close()
        finally:
            self._queue_wait.close()
            self._mailbox.close()

    async def _ask(self, leg: WorkerLeg) -> pb.Done | None:
        """Return the worker's answer, or None if another worker must be asked. Raises BatonError if no other worker may
        be asked."""
        record, stamps = self._parts.record, self._parts.record.stamps
        record.phase, record.num_attempts = RequestState.PREFILLING, max(1, record.num_attempts)
        stamps.prefill_sent = stamps.prefill_sent or now()
        leg.num_prefill_tokens = self._routing.num_tokens
        self._spec.budget_ms = budget_ms(self._parts.deadline)
        leg.send(prefill=pb.Prefill(spec=self._spec))
        until = self._silence_until() if GRANTS_POOLING in leg.link.limits.features else self._parts.deadline
        while True:
            await self._mailbox.wait(until)
            entry = self._mailbox.pop()
            self._check_deadline(RequestState.PREFILLING)
            if entry is None and now() >= until:
                if self._leaves_silent(leg, now() - until):
                    await self._note_failure(leg, None)
                    return None
                until = self._silence_until()
            source, message = entry or (None, None)
            if source is not leg:
                continue  # an event of a worker that was asked before
            if isinstance(message, pb.Granted):
                until, self.num_accepted_tokens = self._parts.deadline, self._routing.num_tokens
                self._queue_wait.leave(served=True)
                self._queue_wait.note_running()
                leg.link.recent_load.add(self._parts.router.prefill_s(self._routing.num_tokens), now())
            if isinstance(message, pb.Done) and self._is_whole(message):
                self._queue_wait.leave(served=True)  # older workers send no Granted
                leg.note_success()
                self.num_accepted_tokens = self.num_prefilled_tokens = self._routing.num_tokens
                return message
            if isinstance(message, pb.Refused):
                self._note_refusal(leg, message)
                return None
            if isinstance(message, (Lost, Stalled, pb.Ended, pb.Done)):
                await self._note_failure(leg, message)
                return None

    def _silence_until(self) -> float:
        """Return until when a worker that is asked now may be silent (time.monotonic())."""
        at = now()
        return min(self._parts.deadline, at + answer_timeout_s(self._parts.deadline - at))

    def _leaves_silent(self, leg: WorkerLeg, late_s: float) -> bool:
        """Return whether to leave the worker, whose answer was due `late_s` ago, since another one is there."""

        def has_other() -> bool:
            exclude = self._tried.unable | {leg.worker_id}
            return self._parts.router.has_worker("prefill", self._routing, exclude=exclude, trusted_only=True)

        return gives_up(leg.link, RequestState.PREFILLING, late_s, has_other)

    def _is_whole(self, done: pb.Done) -> bool:
        """Return whether the vector has as many numbers as the request asks for."""
        num, asked = len(done.pooled), self._spec.pooling
        return num > 0 and num == (len(asked.label_token_ids) or asked.dimensions or num)

    def _note_refusal(self, leg: WorkerLeg, refused: pb.Refused) -> None:
        self._tried.note_refusal(leg.worker_id, refused)
        self._awaits_adapter = refused.reason in AWAITS_ADAPTER
        self._queue_wait.note_refusal(refused)
        self._parts.queues.prefill.refused_for = refused.reason
        self._parts.record.phase = RequestState.AWAITING_PREFILL
        self._parts.record.note_retry(leg.link.name, refused.reason)

    async def _note_failure(self, leg: WorkerLeg, message: Lost | Stalled | pb.Ended | pb.Done | None) -> None:
        """Count an end without a vector, or silence (None), and avoid the worker from now on.

        Returns only once it is known that lost workers are not coming back. Raises BatonError if no other worker may be
        asked."""
        error = error_of(message, "prefill")
        self._limits.note_death(message, leg.link, leg.worker_id)
        if error.code in FINAL_CODES:
            raise error
        self.num_accepted_tokens = 0
        if not isinstance(message, Lost) and error.reason != DRAINING:
            leg.link.note_failure(f"{error.reason} while prefilling")
        self._tried.note_failure(leg.worker_id)
        while not self._limits.check_deaths():
            await asyncio.sleep(_DOUBT_POLL_S)
        self._limits.spend_retry(error)
        self._parts.record.num_attempts += 1

    # ---- waiting ----

    async def _wait_for_worker(self, error: NoWorker) -> None:
        """Wait in a queue for a worker that starts or reconnects. Raises `error` if none may come, or none came."""
        router = self._parts.router
        if not router.may_come("prefill", self._routing):
            raise error
        self._queue_wait.wait_longer(router.max_start_wait_s)
        self._queue_wait.join_for_worker(self._parts.queues.prefill_start)
        if not await self._wait():
            raise error

    async def _wait_for_room(self) -> None:
        """Wait in a queue until a worker may have room, or none serves any more. Raises Overloaded and
        DeadlineExceeded."""
        if self._awaits_adapter:
            self._queue_wait.join_for_worker(self._parts.queues.prefill_start)
        else:
            self._queue_wait.join(self._parts.queues.prefill)
        if not await self._wait() and self._parts.router.has_worker("prefill", self._routing):
            self._queue_wait.time_out()

    async def _wait(self) -> bool:
        """Wait until it is time to look for a worker again; return whether the request may wait longer afterwards.
        Raises DeadlineExceeded."""
        self._parts.record.phase = RequestState.AWAITING_PREFILL
        self._has_capacity.clear()
        until = min(self._parts.deadline, self._queue_wait.wake_at)
        try:
            async with asyncio.timeout(max(0.0, until - now())):
                await self._has_capacity.wait()
        except TimeoutError:
            self._check_deadline(RequestState.AWAITING_PREFILL)
            return not self._queue_wait.is_over
        return True

    def _check_deadline(self, phase: RequestState) -> None:
        if now() >= self._parts.deadline:
            raise DeadlineExceeded(f"the deadline passed while {phase.value}")


async def pool_all(requests: Sequence[PoolingRequest], num_at_once: int) -> list[PooledPrompt]:
    """Return what workers made of the prompts, in the order of `requests`, with `num_at_once` on workers at a time.

    If one fails, the others are cancelled, and its error is raised."""
    found: list[PooledPrompt | None] = [None] * len(requests)
    waiting = iter(enumerate(requests))

    async def work(share: Iterable[tuple[int, PoolingRequest]]) -> None:
        for index, request in share:
            found[index] = await request.run()

    tasks = [asyncio.ensure_future(work(waiting)) for _ in range(min(num_at_once, len(requests)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [each for each in found if each is not None]
