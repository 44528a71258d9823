"""One request on the workers: what it asks of them, attempt after attempt. The events come through course.py."""

from baton.service.clock import now
from baton.service.codec import budget_ms
from baton.service.errors import Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Tokens
from gateway.link.worker_leg import WorkerLeg
from gateway.orchestration.course import NOBODY, Course
from gateway.orchestration.failures import Trial, is_draining
from gateway.orchestration.prefix_source import PrefixSource
from gateway.orchestration.reattach import MAX_ASKED, Attaching
from gateway.orchestration.states import Phase, RequestEvent
from gateway.request.request_spec import make_taker
from gateway.routing.routing import SHORT_TOKENS, needs

_WORKER_WAIT_S, _WORKER_POLL_MS = 2.5, 50  # sessions are tried again every 2 s at least
_DOUBT_S = 1.0  # for a fetch to end whose source has lost its session with us


class Attempts(Course):
    """The actions of the table that ask workers, and what follows from their answers."""

    # ---- actions: up to the answer ----

    def _ignore(self, event, before, subject) -> None:
        pass

    def _ask_for_credit(self, event, before, subject) -> None:
        record = self._record
        avoid = self._failures.avoid | self._refused
        try:
            decision, self._source, taker = self._registry.route(self._ask, self._matches, avoid, self._too_short)
        except Unavailable as error:
            self._await_worker(error)
            return
        self._failed = None
        if record.decision is None and self._lines.credit.is_open_to(
            record.tenant
        ):  # who has stood in line is served, late or not
            record.bid.check(decision, self._lines.prefill.wait_s(record.bid))
        record.decision = decision
        record.stamps.routed = record.stamps.routed or now()
        record.num_attempts += self._spec is None
        self._make_spec()
        self._phase_at = now()  # whoever was asked before has had his time
        self._decode = taker.open(self._next_key(), self._mailbox, record.tenant)
        self._decode.promise(record.ask.slo.tpot_s)
        self._decode.send(admit=pb.Admit(spec=self._spec))

    def _await_worker(self, error: Unavailable) -> None:
        """Whoever has lost one waits a moment for another: it may be coming back just now. Raises Unavailable."""
        if self._failed is None:
            raise error
        lost, until = self._failed
        if now() >= until:
            self._record.phase = self._record.failures[-1].phase  # what nobody has made good
            raise lost
        self.phase = Phase.AWAITING_CREDIT
        self._standing.join(self._lines.credit)
        self._standing.note_refusal(pb.Refused(retry_after_ms=_WORKER_POLL_MS))

    def _await_credit(self, event, before, refused: pb.Refused) -> None:
        self._note_refusal(self._decode.link, refused)
        self._decode.close()
        self._decode = None
        if self._registry.others("decode", self._ask, self._failures.avoid | self._refused | self._too_short):
            self._call_room()
            return
        self._refused = NOBODY
        if self._registry.others("decode", self._ask, self._too_short):
            self._standing.join(self._lines.credit)
        else:
            told = f"no decode worker that serves can hold {needs(self._ask)}"
            self._await_worker(Unavailable(told, 1.0, reason="NO_WORKER"))

    def _ask_for_prefill(self, event, before, granted: pb.Granted | None) -> None:
        if event is RequestEvent.GRANTED:
            self._num_granted_tokens = min(granted.num_cached_tokens, len(self._spec.token_ids))
            self._record.stamps.granted = self._record.stamps.granted or now()
            self._leave_line()
            if self._is_rest_short():
                self._source = None
            if self._source and not self._lines.prefill.is_open_to(self._record.tenant):
                self.happen(RequestEvent.REFUSED, None)
                return
        if not self._answer.begun:
            self._record.stamps.prefill_sent = now()
        num_tokens = self._record.num_prompt_tokens
        if self._source and not (self._source.serving and self._source.worker_id not in self._refused):
            self._source = self._registry.source_for(
                self._decode.link, self._ask, self._matches, self._failures.avoid | self._refused, self._too_short
            )
        faulty = self._failures.faulty
        if self._source is None:
            self._leave_line()
            self._decode.num_prefill_tokens = num_tokens - self._num_granted_tokens
            self._prefix = PrefixSource(self._send_prefill_here)
            is_second = self._record.num_attempts > 1  # what a lost worker held may lie with others
            reader = self._decode.link
            self._holder = holder = self._registry.holder_for(reader, self._matches, faulty) if is_second else None
        else:
            self._prefill = self._source.open(self._decode.key, self._mailbox, self._record.tenant)
            self._prefill.num_prefill_tokens = num_tokens - self._matched(self._source)
            self._prefix = PrefixSource(self._send_prefill)
            reader, holder = self._source, self._registry.holder_for(self._source, self._matches, faulty)
        hashes = self._spec.span_hashes[: self._matches[holder.worker_id]] if holder else ()
        self._prefix.ask(holder, reader, hashes, self._next_key(), self._deadline)

    def _is_rest_short(self) -> bool:
        """A worker that drains holds all but the last span: the decode worker pulls that, and reads the rest itself."""
        if self._record.num_attempts == 1:
            return False
        holder = self._registry.holder_for(self._decode.link, self._matches, self._failures.faulty)
        is_leaving = holder is not None and not holder.serving
        return is_leaving and len(self._spec.token_ids) - self._matched(holder) <= SHORT_TOKENS

    def _send_prefill_here(self, sources: list[pb.KVSource], holder: str | None) -> None:
        """What somebody else holds comes first; the rest is read once it is there."""
        self._record.source = holder
        if sources:
            self._decode.send(fetch=pb.Fetch(handle=sources[0].handle, ticket=sources[0].ticket))
        else:
            self._decode.send(prefill=pb.Prefill())

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
            unwilling = self._failures.avoid | self._refused | self._too_short
            if refused.reason == "too_long" or self._registry.others("prefill", self._ask, unwilling):
                self._call_room()  # where nobody can read it, the decode worker can
                return
            self._refused = NOBODY
        self._standing.join(self._lines.prefill)

    def _fetch(self, event, before, accepted: pb.Accepted) -> None:
        self._leave_line()
        self._lease_id = accepted.lease_id
        self._decode.send(fetch=pb.Fetch(handle=accepted.handle, ticket=accepted.ticket))

    def _note_fetched(self, event, before, fetched: pb.Fetched) -> None:
        if self._source is None and before is Phase.PREFILLING:
            self._decode.send(prefill=pb.Prefill())
            return
        self._fetched = True
        if self._prefill is not None:
            self._prefill.note_success()
        self._record.measured.transfer_s = fetched.transfer_s
        self._record.measured.after_last_ready_s = fetched.after_last_ready_s

    def _begin_answer(self, event, before, done: pb.Done) -> None:
        self._leave_line()
        num_cached_tokens = min(done.num_cached_tokens, len(self._spec.token_ids))
        for leg in (self._decode, self._prefill):
            if leg is not None:
                leg.num_prefill_tokens = 0
        if not self._answer.begun:
            self._record.measured.queue_s, self._record.measured.prefill_s = done.queue_s, done.prefill_s
            self._record.num_cached_tokens = num_cached_tokens
            reader = (self._prefill or self._decode).link
            reader.note_prefill(self._record.num_prompt_tokens - num_cached_tokens, done.prefill_s)
            self._record.batch_size = self._decode.link.load.num_running + 1
        elif self._record.num_attempts > 1:
            self._record.num_reused_tokens += num_cached_tokens
            self._record.num_recomputed_tokens += len(self._spec.token_ids) - num_cached_tokens
        self._note_holder((self._prefill or self._decode).worker_id)
        for first in done.first_tokens:
            logprobs = [first.logprobs] if first.HasField("logprobs") else []
            self._answer.push(first.choice, len(self._output_ids), [first.token_id], logprobs, first.finish_reason)
        going_on = [first for first in done.first_tokens if not self._answer.choices[first.choice].finished]
        for first in going_on:
            first.finished, first.finish_reason = False, 0  # whatever that worker thought
        if going_on and self._source:
            self._decode.send(start=pb.Start(first_tokens=going_on))
        # The prompt, in every stream that is open, is what their memory would go to.
        self._spec = pb.RequestSpec(fingerprint=self._spec.fingerprint, traceparent=self._spec.traceparent)
        self._is_decoding = bool(going_on)

    def _take_tokens(self, event, before, tokens: Tokens) -> None:
        self._has_stepped = True
        self._answer.push(tokens.choice, tokens.first_index, tokens.token_ids, tokens.logprobs, tokens.finish_reason)

    # ---- actions: endings ----

    def _await_report(self, event, before, subject) -> None:
        if not self._is_decoding:
            self.happen(RequestEvent.SILENCE, None)  # the first tokens were the last: nobody has anything to report
        elif self._answer.ended_here:
            self._decode.cancel()

    def _end_ok(self, event, before, ended: pb.Ended | Lost | None) -> None:
        if isinstance(ended, pb.Ended):
            self._record.measured.decode = ended.decode
            self._decode.note_success()
        self._close_legs()

    def _try_again(self, event, before, subject) -> None:
        trial = Trial(
            self._decode, self._prefill, self._source, self._holder, self._is_decoding, self._has_stepped, self._left_at
        )
        error = self._failures.judge(event, before, subject, trial)
        if is_draining(subject) and self._is_decoding and len(self._answer.choices) == 1:
            self._note_holder(self._decode.worker_id, len(self._answer.choices[0].token_ids))
        self._leave_line()
        self._close_legs()
        self._begin_attempt()
        self._failed = error, now() + _WORKER_WAIT_S
        self._ask_for_credit(event, before, None)
        self._record.phase = self.phase.value

    def _leave_stalled(self, event, before, subject) -> None:
        """Where nobody else serves, the stalled worker may still come back."""
        of_prefill = event is RequestEvent.PREFILL_STALLED
        if self._registry.others("prefill" if of_prefill else "decode", self._ask, NOBODY):
            ended = pb.Ended(code=14, reason="STALLED", message="its engine stands still")
            self.happen(RequestEvent.PREFILL_FAILED if of_prefill else RequestEvent.DECODE_FAILED, ended)

    def _doubt_fetch(self, event, before, subject) -> None:
        """The source may live and go on giving; if the fetch has not ended soon, it does not."""
        if self._source is not None and not self._fetched:
            self._doubt_until = now() + _DOUBT_S

    # ---- actions: attaching ----

    def _seek(self) -> None:
        """A client goes on with what another gateway began: some decode worker may have it still."""
        self._make_spec()
        links = [link for link in self._registry.decode if link.serving]
        links.sort(key=lambda link: self._matches.get(link.worker_id), reverse=True)
        next_index = [0] * len(self._answer.choices)  # the text needs every token, the client only some
        self._attaching = Attaching(self._spec, next_index, self._deadline, self._next_key, self._mailbox)
        self._attaching.ask(links[:MAX_ASKED], sum(choice.num_received for choice in self._answer.choices))
        self.phase, self._phase_at = Phase.ATTACHING, now()
        self._record.phase = self.phase.value
        if self._attaching.is_empty:
            self.happen(RequestEvent.SILENCE, None)

    def _reattach(self, event, before, lost: Lost) -> None:
        """The session is gone, the worker perhaps not."""
        self._lost = (event, before, lost)
        self._decode.close()
        next_index = [len(choice.token_ids) for choice in self._answer.choices]
        self._attaching = Attaching(
            self._spec, next_index, self._deadline, self._next_key, self._mailbox, self._decode.key[1]
        )
        if self._is_decoding:
            self._attaching.wait_for(self._decode.link, self._decode.worker_id)
        if self._attaching.is_empty:
            self.happen(RequestEvent.SILENCE, None)

    def _ask_again(self, event, before, leg: WorkerLeg) -> None:
        self._attaching.rejoined(leg)
        if self._attaching.is_empty:
            self.happen(RequestEvent.SILENCE, None)

    def _ask_others(self, event, before, leg: WorkerLeg) -> None:
        self._attaching.drop(leg)
        if self._attaching.is_empty:
            self.happen(RequestEvent.SILENCE, None)

    def _go_on(self, event, before, leg: WorkerLeg) -> None:
        self._decode = self._attaching.take(leg)
        self._decode.promise(self._record.ask.slo.tpot_s)
        self._attaching = self._lost = None
        self._is_decoding = True
        self._record.note_attached()

    def _begin_anew(self, event, before, subject) -> None:
        self._attaching.close()
        self._attaching, lost, self._lost = None, self._lost, None
        if lost is not None:
            self._try_again(*lost)
        elif self._lines.credit.is_open_to(self._record.tenant):
            self._spec = None
            self._ask_for_credit(event, before, None)
        else:
            self._spec, self.phase = None, Phase.AWAITING_CREDIT
            self._standing.join(self._lines.credit)
