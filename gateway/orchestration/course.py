"""The course of one request: every event through the table of states.py, until it has ended.

No task of its own: all legs, the lines and the clock speak through one mailbox, so whoever cancels the caller cancels
everything, and `close()` gives every leg back.
"""

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.service.clock import now
from baton.service.codec import budget_ms
from baton.service.errors import BatonError, Cancelled, DeadlineExceeded, Overloaded, Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.answer.answer import Answer, Diverged
from gateway.fleet.registry import Registry
from gateway.link.mailbox import Mailbox, Tokens
from gateway.link.worker_leg import Key, WorkerLeg
from gateway.link.worker_link import WorkerLink
from gateway.orchestration.failures import Failures
from gateway.orchestration.prefix_source import PrefixSource
from gateway.orchestration.reattach import ATTACH_WAIT_S, Attaching
from gateway.orchestration.retry_budget import Recovery
from gateway.orchestration.states import TABLE, Phase, RequestEvent, event_of
from gateway.prefix.prefix_matches import Matches
from gateway.queue.admission import Lines
from gateway.queue.queue_place import QueuePlace
from gateway.request.request_record import Record
from gateway.routing.routing import RoutingRequest
from kvtransfer.naming import SPAN_TOKENS

# Admit and Prefill are answered from the ledger, at once. A quarter of what is left of the request: two workers that do
# not answer leave a client of 3 s more than a second. Who is silent for as long as the longest has lost its session.
_ANSWER_SHARE, _LEAST_ANSWER_S, _MOST_ANSWER_S = 0.25, 0.25, 2.5
_LATE_S = 0.1  # this process did not run when a wait was over: the answer may lie there unread
_REPORT_S = 0.5
_RENEW_S = 1.5  # a third of a lease
_ASKED = (Phase.ADMITTING, Phase.PREFILLING)  # a worker has something to answer
_ROOM = object()
NOBODY: frozenset = frozenset()

# Attempts are numbered through this process, from anywhere: a request id that is used again never meets its past.
_numbers = itertools.count(secrets.randbits(31))


class Question(NamedTuple):
    """What is asked of workers. `spec_of(output_ids)` makes the RequestSpec of an attempt; `prompt_digest` names the
    prompt; a request that `is_resumed` may be running somewhere."""

    spec_of: Callable[[Sequence[int]], pb.RequestSpec]
    matches: Matches
    deadline: float
    prompt_digest: bytes
    is_resumed: bool


class Course:
    """The actions of the table are methods: those that end the request are here, all others in Attempts."""

    def __init__(
        self, registry: Registry, lines: Lines, recovery: Recovery, answer: Answer, record: Record, question: Question,
        max_queue_wait_s: float,
    ):  # fmt: skip
        self.phase = Phase.AWAITING_CREDIT
        self.error: BatonError | None = None
        self._registry, self._lines, self._answer, self._record = registry, lines, answer, record
        self._spec_of, self._matches, self._deadline = question.spec_of, question.matches, question.deadline
        self._is_resumed = question.is_resumed
        self._max_queue_wait_s = max_queue_wait_s
        self._mailbox = Mailbox()
        self._room_called = False
        self._standing = QueuePlace(record.bid, self._call_room, max_queue_wait_s)
        self._phase_at = self._left_at = now()  # when this phase began, and the one before the last event
        self._failures = Failures(recovery, question.prompt_digest, answer, record)
        self._failed: tuple[BatonError, float] | None = None  # what to say if no worker serves until then
        self._attaching: Attaching | None = None
        self._lost: tuple | None = None  # the event that attaching is the answer to
        self._too_short: frozenset[bytes] = NOBODY  # workers that said it is too long for them, whatever their Hello
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._decode: WorkerLeg | None = None
        self._prefill: WorkerLeg | None = None
        self._prefix: PrefixSource | None = None  # another worker is asked for it before the prefill worker is
        self._source: WorkerLink | None = None  # chosen to prefill; None: the decode worker does
        self._refused: frozenset[bytes] = NOBODY
        self._spec: pb.RequestSpec | None = None
        self._output_ids: list[int] = []  # that the spec carries
        self._num_granted_tokens = 0
        self._lease_id = b""
        self._fetched = False
        self._doubt_until: float | None = None  # whether the fetch will end
        self._holder: WorkerLink | None = None  # who is to give the decode worker a prefix
        self._is_decoding = False  # steps run, or could
        self._has_stepped = False

    async def run(self) -> None:
        """To the end of the request. Raises BatonError; the answer's last message is left to the caller."""
        if self._is_resumed:
            self._seek()
        elif self._lines.credit.is_open_to(self._record.tenant):
            self.happen(RequestEvent.ROOM, None)
        else:
            self._standing.join(self._lines.credit)
        while self.phase is not Phase.ENDED:
            until = self._wait_until()
            entry = await self._mailbox.next(until)
            if now() >= self._deadline:
                self.happen(RequestEvent.DEADLINE, None)
                break
            if entry is None:
                self._on_silence(now() - until)
            self._receive_all(entry)
            if self.error is None:
                await self._answer.flush()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self.phase is not Phase.ENDED:
            self.happen(RequestEvent.CANCEL, None)
        self._standing.close()
        self._close_legs()
        self._mailbox.close()
        self._prefix = self._attaching = None  # they call back: with them it would wait for the collector of circles

    def give_up(self, event: RequestEvent) -> None:
        """CANCEL or GRACE_OVER, from elsewhere: it happens as soon as the request is not busy writing to its client."""
        self._mailbox.post(None, event)

    def happen(self, event: RequestEvent, subject) -> None:
        """One event. Tests call it too: a cell of the table at a time."""
        cell, before = TABLE[self.phase, event], self.phase
        self._left_at = self._phase_at
        if cell.phase is not before:
            self.phase, self._phase_at = cell.phase, now()
            self._record.phase = cell.phase.value if cell.phase is not Phase.ENDED else self._record.phase
        try:
            getattr(self, f"_{cell.action}")(event, before, subject)
        except BatonError as error:
            self._end(error)
        except Diverged as error:
            self._decode.link.note_failure(str(error))
            self._end(Unavailable(str(error), reason="DIVERGED"))

    # ---- what comes in ----

    def _receive_all(self, entry) -> None:
        """This entry of the mailbox, if it is one, and all behind it."""
        while entry is not None:
            self._receive(*entry)
            if self._answer.finished and self.phase is Phase.DECODING:
                self.happen(RequestEvent.FINISHED, None)  # before the Ended that may have come along
            entry = self._mailbox.take()

    def _receive(self, leg: WorkerLeg | None, message) -> None:
        if message is _ROOM:
            self._room_called = False
            self.happen(RequestEvent.ROOM, None)
        elif isinstance(message, RequestEvent):
            self.happen(message, None)
        elif self._attaching is not None and leg in self._attaching:
            event = event_of(message, is_prefill=False)
            self.happen(event, leg)
        elif leg is self._decode or leg is self._prefill:  # not of an earlier attempt
            if isinstance(message, Tokens):
                leg.num_unread -= len(message.token_ids)
            self.happen(event_of(message, is_prefill=leg is self._prefill), message)

    def _wait_until(self) -> float:
        until = self._deadline
        if self.phase in (Phase.AWAITING_CREDIT, Phase.AWAITING_PREFILL):
            until = min(until, self._standing.wake_at)
        elif self.phase in (Phase.ADMITTING, Phase.ENDING) or (self.phase is Phase.PREFILLING and self._source):
            until = min(until, self._phase_at + (_REPORT_S if self.phase is Phase.ENDING else self._answer_s))
        elif self.phase is Phase.ATTACHING:
            until = min(until, self._phase_at + ATTACH_WAIT_S)
        elif self._doubt_until is not None and not self._fetched:
            until = min(until, self._doubt_until)
        elif self._lease_id and not self._fetched:
            until = min(until, now() + _RENEW_S)
        return until

    @property
    def _answer_s(self) -> float:
        """How long whoever is asked in this phase has for an answer."""
        return min(max(_ANSWER_SHARE * (self._deadline - self._phase_at), _LEAST_ANSWER_S), _MOST_ANSWER_S)

    def _on_silence(self, late_s: float) -> None:
        """Nothing came until `_wait_until()`, and so much longer."""
        if late_s > _LATE_S and self.phase in (*_ASKED, Phase.ATTACHING):
            self._phase_at = now()
        elif self.phase in _ASKED and not self._is_another_there():
            leg = self._prefill or self._decode
            leg.link.note_failure(f"silence while {self.phase.value}")
            self._phase_at = now()  # it may still answer
        elif self.phase in (Phase.AWAITING_CREDIT, Phase.AWAITING_PREFILL):
            self.happen(RequestEvent.SILENCE if self._standing.is_over else RequestEvent.ROOM, None)
        elif self._doubt_until is not None and not self._fetched:
            self.happen(RequestEvent.DOUBT_OVER, None)
        elif self._is_renewing:
            self._prefill.send(renew_lease=pb.RenewLease(lease_id=self._lease_id))
        else:
            self.happen(RequestEvent.SILENCE, None)

    def _is_another_there(self) -> bool:
        """To take the request from the worker that is asked, and does not answer."""
        if self.phase is Phase.PREFILLING and self._registry.may_read_where_it_decodes:
            return True
        asked, role = (self._decode, "decode") if self.phase is Phase.ADMITTING else (self._prefill, "prefill")
        return self._registry.others(role, self._ask, self._too_short | {asked.worker_id})

    @property
    def _is_renewing(self) -> bool:
        """A lease that nobody has taken yet, and nothing else is waited for."""
        is_waiting = self.phase in (Phase.FETCHING, Phase.DECODING) and self._doubt_until is None
        return is_waiting and bool(self._lease_id) and not self._fetched

    # ---- actions: endings ----

    def _end_full(self, event, before, subject) -> None:
        waited_s = self._max_queue_wait_s
        self._end(Overloaded(f"no worker had room for {waited_s:g} s", max(1.0, waited_s / 10), reason="QUEUE_WAIT"))

    def _end_unread(self, event, before, subject) -> None:
        self._end(Overloaded("too many tokens of this answer are unread", 0.0, reason="SLOW_READER"))

    def _end_deadline(self, event, before, subject) -> None:
        self._end(DeadlineExceeded(f"the deadline passed while {before.value}"))

    def _end_draining(self, event, before, subject) -> None:
        told = "this gateway is shutting down: send the same request with the returned seed and resume_from"
        self._end(Unavailable(told, 0.0, reason="DRAINING"))

    def _end_cancelled(self, event, before, subject) -> None:
        self._end(Cancelled("the client went away"))

    def _end(self, error: BatonError) -> None:
        self.phase, self.error = Phase.ENDED, error
        self._leave_line()
        self._close_legs()

    # ---- what actions share ----

    @property
    def _ask(self) -> RoutingRequest:
        """What routing is told: who goes on with an answer has what there is of it read with the prompt."""
        ask = self._record.ask
        if len(self._answer.choices) > 1:
            return ask
        return ask._replace(num_tokens=ask.num_tokens + len(self._answer.choices[0].token_ids))

    def _make_spec(self) -> None:
        """One choice goes on from what it has; several begin anew, and repeat what the client has."""
        if self._spec is None:
            self._output_ids = list(self._answer.choices[0].token_ids) if len(self._answer.choices) == 1 else []
            self._spec = self._spec_of(self._output_ids)
        self._spec.budget_ms = budget_ms(self._deadline)

    def _note_refusal(self, link: WorkerLink, refused: pb.Refused) -> None:
        self._refused |= {link.worker_id}
        if refused.reason == "too_long":
            self._too_short |= {link.worker_id}
        self._record.note_retry(link.name, refused.reason)
        self._standing.note_refusal(refused)

    def _leave_line(self) -> None:
        self._standing.leave(served=self.phase is not Phase.ENDED)

    def _next_key(self) -> Key:
        return self._answer.key_id, next(_numbers) & 0xFFFFFFFF

    def _note_holder(self, worker_id: bytes, num_output_tokens: int = 0) -> None:
        """Who has read the prompt, and has written so much of the answer, holds its spans, for the next attempt."""
        self._matches.note(worker_id, (self._record.num_prompt_tokens + num_output_tokens - 1) // SPAN_TOKENS)

    def _matched(self, link: WorkerLink) -> int:
        return self._matches.get(link.worker_id) * SPAN_TOKENS

    def _call_room(self) -> None:
        if not self._room_called:
            self._room_called = True
            self._mailbox.post(None, _ROOM)

    def _close_legs(self) -> None:
        for leg in (self._decode, self._prefix, self._prefill, self._attaching):
            if leg is not None:
                leg.close()
        self._lease_id = b""
