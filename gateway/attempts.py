"""One request on the workers: attempt after attempt, every event through the table of states.py.

No task of its own: both legs, the lines and the clock speak through one mailbox, so whoever cancels the caller cancels
everything, and `close()` gives every leg back.
"""

import itertools
import secrets
from collections.abc import Callable

import grpc

from baton.service.codec import budget_ms
from baton.service.errors import (
    BatonError, Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, from_code,
)  # fmt: skip
from baton.v1 import worker_pb2 as pb
from gateway.admission import Line, Lines, Place
from gateway.answer import Answer, Diverged
from gateway.prefix_source import PrefixSource
from gateway.record import Failure, Record
from gateway.registry import Registry
from gateway.spec import make_taker
from gateway.states import TABLE, Event, Phase, event_of
from gateway.timing import now
from gateway.workers import Leg, Lost, Mailbox, Tokens, WorkerLink

MAX_ATTEMPTS = 4
_MAX_DEATHS = 2  # of workers that completed no step of this request
_ANSWER_S = 10.0  # Admit and Prefill are answered from the ledger, at once
_REPORT_S = 0.5
_RENEW_S = 1.5  # a third of a lease
_LEAST_HINT_S, _LONGEST_HINT_S = 0.02, 0.5
_KV_REASONS = frozenset(
    ("KV_TRANSFER_FAILED", "LEASE_EXPIRED", "TICKET_REFUSED", "LAYOUT_MISMATCH", "DIGEST_MISMATCH")
)
_FINAL_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED)
_ROOM = object()

# Attempts are numbered through this process, from anywhere: a request id that is used again never meets its past.
_numbers = itertools.count(secrets.randbits(31))


def _next_attempt() -> int:
    return next(_numbers) & 0xFFFFFFFF


class Attempts:
    """`spec_of(deadline, output_ids)` makes the RequestSpec of an attempt. `matches`: worker -> spans it holds."""

    def __init__(
        self, registry: Registry, lines: Lines, answer: Answer, record: Record, matches: dict[bytes, int],
        spec_of: Callable[[list[int]], pb.RequestSpec], deadline: float, max_queue_wait_s: float,
    ):  # fmt: skip
        self.phase = Phase.AWAITING_CREDIT
        self.error: BatonError | None = None
        self._registry, self._lines, self._answer, self._record = registry, lines, answer, record
        self._matches, self._spec_of, self._deadline = matches, spec_of, deadline
        self._max_queue_wait_s = max_queue_wait_s
        self._mailbox = Mailbox()
        self._room_called = False
        self._place: tuple[Line, Place] | None = None
        self._queued_at: float | None = None
        self._retry_at = 0.0
        self._phase_at = self._left_at = now()  # when this phase began, and the one before the last event
        self._num_deaths = 0
        self._suspects: list[tuple[WorkerLink, bytes]] = []  # sources that a transfer failed from: dead, perhaps
        self._avoid: set[bytes] = set()  # workers that failed this request
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._decode: Leg | None = None
        self._prefill: Leg | None = None
        self._prefix: PrefixSource | None = None  # another worker is asked for it before the prefill worker is
        self._source: WorkerLink | None = None  # chosen to prefill; None: the decode worker does
        self._refused: set[bytes] = set()
        self._refusals: set[str] = set()
        self._spec: pb.RequestSpec | None = None
        self._output_ids: list[int] = []  # that the spec carries
        self._num_granted_tokens = 0
        self._lease_id = b""
        self._fetched = False
        self._is_decoding = False  # steps run, or could
        self._has_stepped = False

    async def run(self) -> None:
        """To the end of the request. Raises BatonError; the answer's last message is left to the caller."""
        if self._lines.credit.is_empty:
            self.happen(Event.ROOM, None)
        else:
            self._join(self._lines.credit)
        while self.phase is not Phase.ENDED:
            entry = await self._mailbox.next(self._wait_s())
            if now() >= self._deadline:
                self.happen(Event.DEADLINE, None)
                break
            if entry is None:
                self._on_silence()
            while entry is not None:
                self._receive(*entry)
                if self._answer.finished and self.phase is Phase.DECODING:
                    self.happen(Event.FINISHED, None)  # before the Ended that may have come along
                entry = self._mailbox.take()
            if self.error is None:
                await self._answer.flush()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self.phase is not Phase.ENDED:
            self.happen(Event.CANCEL, None)
        self._leave_line()
        self._close_legs()

    def happen(self, event: Event, subject) -> None:
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
            self._end(Unavailable(str(error), reason="DIVERGED"))

    # ---- what comes in ----

    def _receive(self, leg: Leg | None, message) -> None:
        if message is _ROOM:
            self._room_called = False
            self.happen(Event.ROOM, None)
        elif leg is self._decode or leg is self._prefill:  # not of an earlier attempt
            if isinstance(message, Tokens):
                leg.num_unread -= len(message.token_ids)
            self.happen(event_of(message, is_prefill=leg is self._prefill), message)

    def _wait_s(self) -> float:
        until = self._deadline
        if self.phase in (Phase.AWAITING_CREDIT, Phase.AWAITING_PREFILL):
            until = min(until, self._queue_until())
        elif self.phase in (Phase.ADMITTING, Phase.ENDING) or (self.phase is Phase.PREFILLING and self._source):
            until = min(until, self._phase_at + (_REPORT_S if self.phase is Phase.ENDING else _ANSWER_S))
        elif self._lease_id and not self._fetched:
            until = min(until, now() + _RENEW_S)
        return max(0.0, until - now())

    def _queue_until(self) -> float:
        limit = (self._queued_at or now()) + self._max_queue_wait_s
        is_first = self._place is not None and self._place[0].is_first(self._place[1])
        return min(limit, self._retry_at) if is_first else limit

    def _on_silence(self) -> None:
        """Nothing came for `_wait_s()`."""
        if self.phase in (Phase.AWAITING_CREDIT, Phase.AWAITING_PREFILL):
            is_over = now() >= (self._queued_at or now()) + self._max_queue_wait_s
            self.happen(Event.SILENCE if is_over else Event.ROOM, None)
        elif self._lease_id and not self._fetched and self.phase in (Phase.FETCHING, Phase.DECODING):
            self._prefill.send(renew_lease=pb.RenewLease(lease_id=self._lease_id))
        else:
            self.happen(Event.SILENCE, None)

    # ---- actions: up to the answer ----

    def _ignore(self, event, before, subject) -> None:
        pass

    def _ask_for_credit(self, event, before, subject) -> None:
        record, max_len = self._record, self._record.num_prompt_tokens + 1
        decision, self._source, taker = self._registry.route(
            record.num_prompt_tokens, max_len, self._matches, self._avoid | self._refused
        )
        record.decision = decision
        record.stamps.routed = record.stamps.routed or now()
        record.num_attempts += self._spec is None
        self._make_spec()
        self._decode = taker.open((self._answer.request_id, _next_attempt()), self._mailbox)
        self._decode.send(admit=pb.Admit(spec=self._spec))

    def _await_credit(self, event, before, refused: pb.Refused) -> None:
        self._note_refusal(self._decode.link, refused)
        self._decode.close()
        self._decode = None
        if self._registry.others(self._registry.decode, self._avoid | self._refused):
            self._call_room()
            return
        if self._refusals == {"too_long"}:
            raise InvalidRequest("stopping.max_tokens", "prompt and answer need more KV blocks than any worker has")
        self._refused, self._refusals = set(), set()
        self._join(self._lines.credit)

    def _ask_for_prefill(self, event, before, granted: pb.Granted | None) -> None:
        if event is Event.GRANTED:
            self._num_granted_tokens = granted.num_cached_tokens
            self._record.stamps.granted = self._record.stamps.granted or now()
            self._leave_line()
            if self._source and not self._lines.prefill.is_empty:
                self.happen(Event.REFUSED, None)
                return
        if not self._answer.begun:
            self._record.stamps.prefill_sent = now()
        num_tokens = self._record.num_prompt_tokens
        if self._source and not (self._source.serving and self._source.worker_id not in self._refused):
            self._source = self._registry.source_for(
                self._decode.link, num_tokens, self._matches, self._avoid | self._refused
            )
        if self._source is None:
            self._leave_line()
            self._decode.num_prefill_tokens = num_tokens - self._num_granted_tokens
            self._decode.send(prefill=pb.Prefill())
            return
        self._prefill = self._source.open(self._decode.key, self._mailbox)
        self._prefill.num_prefill_tokens = num_tokens
        self._prefix = PrefixSource(self._send_prefill)
        holder = self._registry.holder_for(self._source, self._matches, self._avoid)
        hashes = self._spec.span_hashes[: self._matches[holder.worker_id]] if holder else ()
        self._prefix.ask(holder, self._source, hashes, (self._answer.request_id, _next_attempt()), self._deadline)

    def _send_prefill(self, sources: list[pb.KVSource], holder: str | None) -> None:
        self._record.source = holder
        self._spec.budget_ms = budget_ms(self._deadline)
        taker = make_taker(self._decode.link, self._num_granted_tokens)
        self._prefill.send(prefill=pb.Prefill(spec=self._spec, taker=taker, sources=sources))

    def _await_prefill(self, event, before, refused: pb.Refused | None) -> None:
        if refused is not None:
            self._note_refusal(self._prefill.link, refused)
            self._prefill.close()
            self._prefix.close()
            self._prefill = self._prefix = None
            if self._registry.others(self._registry.prefill, self._avoid | self._refused):
                self._call_room()
                return
            self._refused = set()
        self._join(self._lines.prefill)

    def _fetch(self, event, before, accepted: pb.Accepted) -> None:
        self._leave_line()
        self._lease_id = accepted.lease_id
        self._decode.send(fetch=pb.Fetch(handle=accepted.handle, ticket=accepted.ticket))

    def _note_fetched(self, event, before, fetched: pb.Fetched) -> None:
        self._fetched = True
        self._record.measured.transfer_s = fetched.transfer_s
        self._record.measured.after_last_ready_s = fetched.after_last_ready_s

    def _begin_answer(self, event, before, done: pb.Done) -> None:
        self._leave_line()
        for leg in (self._decode, self._prefill):
            if leg is not None:
                leg.num_prefill_tokens = 0
        if not self._answer.begun:
            self._record.measured.queue_s, self._record.measured.prefill_s = done.queue_s, done.prefill_s
            self._record.num_cached_tokens = done.num_cached_tokens
            reader = (self._prefill or self._decode).link
            reader.note_prefill(self._record.num_prompt_tokens - done.num_cached_tokens, done.prefill_s)
            self._record.batch_size = self._decode.link.load.num_running + 1
        for first in done.first_tokens:
            logprobs = [first.logprobs] if first.HasField("logprobs") else []
            self._answer.push(first.choice, len(self._output_ids), [first.token_id], logprobs, first.finish_reason)
        going_on = [first for first in done.first_tokens if not self._answer.choices[first.choice].finished]
        if going_on and self._source:
            self._decode.send(start=pb.Start(first_tokens=going_on))
        self._is_decoding = bool(going_on)

    def _take_tokens(self, event, before, tokens: Tokens) -> None:
        self._has_stepped = True
        self._answer.push(tokens.choice, tokens.first_index, tokens.token_ids, tokens.logprobs, tokens.finish_reason)

    # ---- actions: endings ----

    def _await_report(self, event, before, subject) -> None:
        if not self._is_decoding:
            self.happen(Event.SILENCE, None)  # the first tokens were the last: nobody has anything to report
        elif self._answer.ended_here:
            self._decode.cancel()

    def _end_ok(self, event, before, ended: pb.Ended | Lost | None) -> None:
        if isinstance(ended, pb.Ended):
            self._record.measured.decode = ended.decode
        self._close_legs()

    def _try_again(self, event, before, subject) -> None:
        error, blamed = self._failure(event, before, subject)
        self._num_deaths += self._counts_as_death(event, before, subject)
        self._note_failure(event, before, subject, error, blamed)
        self._avoid.add(blamed.worker_id)
        self._leave_line()
        self._close_legs()
        if error.code in _FINAL_CODES or error.reason == "SLOW_READER":
            raise error
        num_dead = sum(link.worker_id != worker_id for link, worker_id in self._suspects)
        if self._num_deaths + num_dead >= _MAX_DEATHS:
            raise from_code(
                grpc.StatusCode.ABORTED, "two workers died with this request in their hands", reason="POISON"
            )
        if self._record.num_attempts >= MAX_ATTEMPTS:
            raise error
        self._begin_attempt()
        try:
            self._ask_for_credit(event, before, None)
        except Unavailable:
            raise error from None
        self._record.phase = self.phase.value

    def _end_full(self, event, before, subject) -> None:
        waited_s = self._max_queue_wait_s
        self._end(Overloaded(f"no worker had room for {waited_s:g} s", max(1.0, waited_s / 10), reason="QUEUE_WAIT"))

    def _end_unread(self, event, before, subject) -> None:
        self._end(Overloaded("too many tokens of this answer are unread", 0.0, reason="SLOW_READER"))

    def _end_deadline(self, event, before, subject) -> None:
        self._end(DeadlineExceeded(f"the deadline passed while {before.value}"))

    def _end_cancelled(self, event, before, subject) -> None:
        self._end(Cancelled("the client went away"))

    def _end(self, error: BatonError) -> None:
        self.phase, self.error = Phase.ENDED, error
        self._leave_line()
        self._close_legs()

    # ---- what actions share ----

    def _failure(self, event: Event, before: Phase, subject) -> tuple[BatonError, WorkerLink]:
        """What to say if nobody can take over, and the worker to keep away from."""
        of_prefill = event in (Event.PREFILL_ENDED, Event.PREFILL_FAILED, Event.PREFILL_LOST)
        of_prefill |= event is Event.SILENCE and before is Phase.PREFILLING
        leg, role = (self._prefill, "prefill") if of_prefill else (self._decode, "decode")
        blamed = leg.link
        if isinstance(subject, pb.Ended) and subject.code:
            error = from_code(subject.code, subject.message, reason=subject.reason or None)
            if not of_prefill and self._source and subject.reason in _KV_REASONS:
                blamed = self._source
                if before is Phase.FETCHING and self._prefill is not None:
                    self._suspects.append((blamed, blamed.worker_id))
        else:
            silent = "it ended early" if subject else "it does not answer"
            what = subject.reason if isinstance(subject, Lost) else silent
            sent = f" after {self._answer.num_output_tokens} tokens" if self._answer.begun else ""
            error = Unavailable(
                f"{role} worker lost{sent}: {what}", retry_after_s=1.0, reason=f"{role.upper()}_WORKER_LOST"
            )
        return error, blamed

    def _note_failure(self, event: Event, before: Phase, subject, error: BatonError, blamed: WorkerLink) -> None:
        is_told = isinstance(subject, pb.Ended) and bool(subject.code)
        sent, self._record.phase = self._answer.num_output_tokens, before.value
        self._record.failures.append(
            Failure(before.value, event.value, self._left_at, now(), blamed.name, error.reason, is_told, sent)
        )

    def _counts_as_death(self, event: Event, before: Phase, subject) -> bool:
        """Only if the request was being computed there, and no step of it came to an end."""
        died = isinstance(subject, Lost) or (isinstance(subject, pb.Ended) and subject.reason == "ENGINE_FAILED")
        if event in (Event.PREFILL_LOST, Event.PREFILL_FAILED):
            return died and before in (Phase.PREFILLING, Phase.FETCHING)
        is_local_prefill = before is Phase.PREFILLING and self._source is None
        return died and not self._has_stepped and (self._is_decoding or is_local_prefill)

    def _make_spec(self) -> None:
        """One choice goes on from what it has; several begin anew, and repeat what the client has."""
        if self._spec is None:
            self._output_ids = list(self._answer.choices[0].token_ids) if len(self._answer.choices) == 1 else []
            self._spec = self._spec_of(self._output_ids)
        self._spec.budget_ms = budget_ms(self._deadline)

    def _note_refusal(self, link: WorkerLink, refused: pb.Refused) -> None:
        self._refused.add(link.worker_id)
        self._refusals.add(refused.reason)
        self._record.note_retry(link.name, refused.reason)
        self._retry_at = now() + min(max(refused.retry_after_ms / 1000, _LEAST_HINT_S), _LONGEST_HINT_S)

    def _join(self, line: Line) -> None:
        self._queued_at = self._queued_at or now()
        if self._place is None:
            self._retry_at = max(self._retry_at, now() + _LEAST_HINT_S)
            self._place = line, line.join(self._record.checked.priority, self._call_room)

    def _leave_line(self) -> None:
        if self._place is not None:
            line, place = self._place
            self._place = self._queued_at = None
            line.leave(place)

    def _call_room(self) -> None:
        if not self._room_called:
            self._room_called = True
            self._mailbox.post(None, _ROOM)

    def _close_legs(self) -> None:
        for leg in (self._decode, self._prefix, self._prefill):
            if leg is not None:
                leg.close()
        self._lease_id = b""
