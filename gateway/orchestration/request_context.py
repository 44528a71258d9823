"""One request on its way through workers: the parts that its state machine and the actions of the table use."""

from typing import NamedTuple

from baton.service.codec import budget_ms
from gateway.answer.answer import Answer
from gateway.attempts.attempt import Attempt
from gateway.attempts.failure_limits import FailureLimits
from gateway.attempts.reattach import Reattach
from gateway.attempts.request_router import RequestRouter
from gateway.attempts.retry_throttle import RetryThrottle
from gateway.fleet.router import Router
from gateway.link.mailbox import Lost, Mailbox
from gateway.orchestration.failures import RequestFailures
from gateway.orchestration.states import Occurrence, RequestEvent
from gateway.prefix.prefix_matches import Matches
from gateway.queue.queue_wait import QueueWait
from gateway.queue.waiting_queue import WaitingQueues
from gateway.request.request_record import RequestRecord
from gateway.request.request_spec import SpecBuilder
from gateway.request.request_state import RequestState


class PreparedRequest(NamedTuple):
    """A validated request, tokenized and looked up in the prefix index.

    `deadline` is in time.monotonic(). If `is_resumed`, a worker may still have the sequence."""

    specs: SpecBuilder
    matches: Matches
    deadline: float
    prompt_digest: bytes
    is_resumed: bool


class RequestContext:
    """The parts of one request: `router` finds workers, `attempt` has the legs on them, `reattach` looks for a lost
    sequence, `failures` decides on retries within `limits`, `queue_wait` waits in a queue, and `answer` goes to the
    client.

    The state of the request is kept by RequestMachine."""

    __slots__ = (
        "queues",
        "answer",
        "record",
        "deadline",
        "is_resumed",
        "mailbox",
        "queue_wait",
        "router",
        "limits",
        "failures",
        "attempt",
        "reattach",
        "lost",
        "specs",
        "_is_capacity_posted",
    )

    def __init__(
        self,
        router: Router,
        queues: WaitingQueues,
        throttle: RetryThrottle,
        answer: Answer,
        record: RequestRecord,
        prepared: PreparedRequest,
        max_queue_wait_s: float,
    ):
        self.queues, self.answer, self.record = queues, answer, record
        self.deadline, self.is_resumed = prepared.deadline, prepared.is_resumed
        self.mailbox = Mailbox()
        self.queue_wait = QueueWait(record.queued, self.post_capacity, max_queue_wait_s)
        self.router = RequestRouter(router, prepared.matches, record, answer)
        self.limits = FailureLimits(throttle, prepared.prompt_digest)
        self.failures = RequestFailures(self.limits, self.router, answer, record)
        self.attempt = self._new_attempt()
        self.reattach: Reattach | None = None
        self.lost: Occurrence[Lost] | None = None  # the loss for which `reattach` was begun; None: the client resumes
        self.specs = prepared.specs
        self._is_capacity_posted = False

    @property
    def is_prompt_taken(self) -> bool:
        """Return whether a worker has accepted the prompt and reads it, or did so at the end."""
        phase = self.record.phase
        return phase is RequestState.FETCHING or (phase is RequestState.PREFILLING and self.attempt.prefill is None)

    def begin_attempt(self) -> None:
        """Begin the next attempt, which may ask every worker that has not failed."""
        self.attempt = self._new_attempt()
        self.router.forget_refusals()

    def make_spec(self) -> None:
        """Make the attempt's spec if there is none, and set the time that is left for it.

        A single choice continues behind its tokens so far. Several choices start over: they compute again the tokens
        that the client has."""
        attempt, choices = self.attempt, self.answer.choices
        if attempt.spec is None:
            attempt.output_ids = tuple(choices[0].token_ids) if len(choices) == 1 else ()
            attempt.spec = self.specs.build(attempt.output_ids, self.answer.has_begun)
            attempt.fingerprint = attempt.spec.fingerprint
        attempt.spec.budget_ms = budget_ms(self.deadline)

    def leave_queue(self) -> None:
        """Leave the queue in which the request waits, if any, since a worker takes the request."""
        self.queue_wait.leave(served=True)

    def post_capacity(self) -> None:
        """Post CAPACITY to the mailbox, unless it is there already."""
        if not self._is_capacity_posted:
            self._is_capacity_posted = True
            self.mailbox.post(None, RequestEvent.CAPACITY)

    def note_capacity_taken(self) -> None:
        """Note that CAPACITY has been taken out of the mailbox."""
        self._is_capacity_posted = False

    def note_output(self) -> None:
        """Record how many tokens the answer has, for views of running requests and for the request's report."""
        record, counts = self.record, [len(choice.token_ids) for choice in self.answer.choices]
        record.num_output_tokens, record.num_longest_output = sum(counts), max(counts)

    def release(self) -> None:
        """Leave the queue and close all legs. Idempotent."""
        self.queue_wait.leave(served=False)
        self.attempt.close()
        if self.reattach is not None:
            self.reattach.close()

    def close(self) -> None:
        """Release everything; no event can reach the request afterwards. Idempotent."""
        self.release()
        self.queue_wait.close()
        self.mailbox.close()
        self.reattach = None

    def _new_attempt(self) -> Attempt:
        return Attempt(self.answer.key_id, self.mailbox, self.record, self.deadline)
