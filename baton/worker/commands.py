"""The commands of all sessions and what happens to their keys: every event goes through the table of states.py.

Belongs to the event loop. Calls into the engine's ledger are answered at once; the engine's outputs come in batches.
A command that fails ends its key, never the stream; each key ends in `_settle` and nowhere else.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence

from baton.engine.engine import Engine
from baton.engine.request import Key, Output, PrefillDone, Progress, Refusal, Request, RequestEnded, TokenRun
from baton.service.codec import deadline_of, key_from_proto, key_to_proto
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from baton.worker import codec, endings
from baton.worker.endings import Status
from baton.worker.handoff import Handoff
from baton.worker.intake import Intake
from baton.worker.leg import Leg, Owed
from baton.worker.outbox import Outbox
from baton.worker.states import OPENING, TABLE, Event, State
from kvtransfer.errors import KVError, LeaseExpired
from kvtransfer.fetcher import FetchReport
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.wire import Taker

DRAINING_RETRY_S = 1.0
IN_USE_RETRY_S = 0.05

log = logging.getLogger(__name__)

_COMMAND_EVENTS = {
    "admit": Event.ADMIT,
    "fetch": Event.FETCH,
    "start": Event.START,
    "offer": Event.OFFER,
    "cancel": Event.CANCEL,
    "attach": Event.ATTACH,
    "renew_lease": Event.RENEW,
}


class Commands:
    """All live keys of one worker."""

    def __init__(
        self,
        engine: Engine,
        handoff: Handoff,
        intake: Intake,
        on_change: Callable[[], None],
        on_ended: Callable[[Leg], None],
    ):
        """`on_change`: the load is different now. `on_ended`: a key has ended, with all its stamps."""
        self.legs: dict[Key, Leg] = {}
        self.is_draining = False
        self._engine = engine
        self._handoff = handoff
        self._intake = intake
        handoff.on_over = self.on_lease_over
        self._on_change = on_change
        self._on_ended = on_ended

    # ---- what comes in ----

    def obey(self, outbox: Outbox, command: pb.Command) -> None:
        """One command with a key, from the session that `outbox` belongs to."""
        kind = command.WhichOneof("kind")
        message = getattr(command, kind)
        if kind == "prefill":
            event = Event.PREFILL if message.HasField("taker") else Event.PREFILL_HERE
        else:
            event = _COMMAND_EVENTS[kind]
        key = Key(*key_from_proto(message.key))
        leg = self.legs.get(key) or Leg(key, outbox)
        if leg.outbox is outbox:
            self.happen(leg, event, message)
        elif event in OPENING:  # another gateway's key, by accident: that one goes on
            outbox.reply(codec.refused(key, "in_use", IN_USE_RETRY_S))

    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """What one step of the engine gave out."""
        for output in outputs:
            leg = self.legs.get(output.key)
            if leg is None:
                continue
            if isinstance(output, TokenRun):
                self._on_run(leg, output)
            elif isinstance(output, Progress):
                self.happen(leg, Event.PROGRESS, output)
            elif isinstance(output, PrefillDone):
                self.happen(leg, Event.PREFILL_DONE, output)
            else:
                leg.owed.discard(Owed.ENGINE)
                leg.report = output.report
                self.happen(leg, Event.ENGINE_ENDED, output)

    def on_fetch_end(self, leg: Leg, outcome: FetchReport | Status | None) -> None:
        """No byte of the key's fetch can land any more. None: the engine has ended the key, and says why."""
        leg.owed.discard(Owed.FETCH)
        leg.fetch_ended_at = time.monotonic()
        if isinstance(outcome, FetchReport):
            leg.fetch_report = outcome
            self.happen(leg, Event.FETCHED, outcome)
        else:
            self.happen(leg, Event.FETCH_FAILED, outcome)

    def on_lease_over(self, key: Key, ending: str) -> None:
        """The takers have all they wanted, or never will; `ending` in the source's words."""
        leg = self.legs.get(key)
        if leg is not None and Owed.LEASE in leg.owed:
            leg.owed.discard(Owed.LEASE)
            self.happen(leg, Event.LEASE_OVER, ending)

    def on_stream_lost(self, outbox: Outbox) -> None:
        """Everything that came through this session is given up."""
        for leg in [leg for leg in self.legs.values() if leg.outbox is outbox]:
            leg.is_stream_lost = True
            self.happen(leg, Event.STREAM_LOST, None)

    def start_draining(self) -> None:
        """Nothing new from here on."""
        self.is_draining = True
        self._on_change()

    def on_grace_over(self) -> None:
        """The worker must go: whatever still runs ends."""
        for leg in list(self.legs.values()):
            self.happen(leg, Event.GRACE_OVER, None)

    def happen(self, leg: Leg, event: Event, subject) -> None:
        """One event of one key. `subject` is the command's message or what the happening brought."""
        cell = TABLE[leg.state, event]
        was_absent = leg.state is State.ABSENT
        leg.state = cell.state
        if was_absent and cell.state is not State.ABSENT:
            self.legs[leg.key] = leg
        try:
            getattr(self, f"_{cell.action}")(leg, subject)
        except Refusal as refusal:
            if was_absent and not leg.owed:
                self._forget(leg)
                leg.outbox.reply(codec.refused(leg.key, refusal.reason, refusal.retry_after_s))
            else:
                self._end(leg, endings.of_exception(refusal))
        except Exception as error:  # a failing command ends its key, never the stream
            if not isinstance(error, (ValueError, KVError, TimeoutError)):
                log.exception("key failed %s", fields(key=leg.key, event=event.value))
            self._end(leg, endings.of_exception(error))

    # ---- actions: opening ----

    def _admit(self, leg: Leg, message: pb.Admit) -> None:
        request = self._open(leg, message.spec)
        leg.num_cached_tokens = self._engine.admit(request)
        leg.owed.add(Owed.ENGINE)
        granted = pb.Granted(key=key_to_proto(leg.key), num_cached_tokens=leg.num_cached_tokens)
        leg.outbox.reply(pb.Event(granted=granted))
        self._on_change()

    def _prefill(self, leg: Leg, message: pb.Prefill) -> None:
        request = self._open(leg, message.spec)
        taker = self._handoff.taker_of(message.taker)
        leg.sources = [(source.handle, source.ticket) for source in message.sources]
        acceptance = self._engine.accept(request, bool(leg.sources))
        leg.owed.add(Owed.ENGINE)
        leg.is_prefill = True
        leg.num_cached_tokens = acceptance.num_cached_tokens
        offer = self._handoff.lease_prompt(leg, acceptance, taker)
        leg.owed.add(Owed.LEASE)
        accepted = pb.Accepted(key=key_to_proto(leg.key), num_cached_tokens=acceptance.num_cached_tokens, **offer)
        leg.outbox.reply(pb.Event(accepted=accepted))
        if leg.sources:
            self._pull_prefix(leg, None)
        self._on_change()

    def _prefill_here(self, leg: Leg, message: pb.Prefill) -> None:
        request = leg.request or self._open(leg, message.spec)
        self._engine.submit(request)
        leg.owed.add(Owed.ENGINE)
        leg.is_prefill = True
        self._on_change()

    def _offer(self, leg: Leg, message: pb.Offer) -> None:
        self._check_open(leg)
        self._set_deadline(leg, deadline_of(message.budget_ms))
        taker = self._handoff.taker_of(message.taker)
        if message.WhichOneof("what") == "lease_id":
            self._offer_again(leg, message.lease_id, taker)
            return
        hashes = codec.chain_of(message.spans)
        acceptance = self._engine.offer(leg.key, hashes)
        if acceptance.blocks:
            leg.owed.add(Owed.ENGINE)
        if acceptance.num_cached_tokens < len(hashes) * SPAN_TOKENS:
            leg.num_matched_tokens = acceptance.num_cached_tokens
            self._end(leg, endings.OK)
            return
        offer = self._handoff.lease_chain(leg, acceptance, hashes, taker)
        leg.owed.add(Owed.LEASE)
        leg.outbox.reply(pb.Event(offered=pb.Offered(key=key_to_proto(leg.key), **offer)))

    def _offer_again(self, leg: Leg, lease_id: bytes, taker: Taker) -> None:
        """A lease that another key has here, for one more taker."""
        try:
            offer = self._handoff.lease_again(leg, lease_id, taker)
        except LeaseExpired:
            leg.num_matched_tokens = 0
            self._end(leg, endings.OK)
            return
        leg.owed.add(Owed.LEASE)
        leg.outbox.reply(pb.Event(offered=pb.Offered(key=key_to_proto(leg.key), **offer)))

    def _open(self, leg: Leg, spec: pb.RequestSpec) -> Request:
        """The request of a new key, checked; nothing is allocated yet."""
        self._check_open(leg)
        request = codec.request_of(leg.key, spec, self._engine.spec.vocab_size)
        self._set_deadline(leg, request.deadline)
        leg.request = request
        return request

    def _check_open(self, leg: Leg) -> None:
        if self.is_draining:
            raise Refusal("draining", DRAINING_RETRY_S)
        if not leg.key.request_id:
            raise ValueError("key.request_id is empty")

    def _set_deadline(self, leg: Leg, deadline: float) -> None:
        if deadline <= time.monotonic():
            raise TimeoutError
        leg.timer = asyncio.get_running_loop().call_at(deadline, self.happen, leg, Event.DEADLINE, None)

    # ---- actions: going on ----

    def _fetch(self, leg: Leg, message: pb.Fetch) -> None:
        leg.fetch_at = time.monotonic()
        self._intake.begin(leg, message.handle, message.ticket, self.on_fetch_end)
        leg.owed.add(Owed.FETCH)

    def _report_fetched(self, leg: Leg, report: FetchReport) -> None:
        leg.outbox.reply(codec.fetched(leg.key, report))

    def _keep_first_tokens(self, leg: Leg, message: pb.Start) -> None:
        leg.start_at = time.monotonic()
        leg.first_tokens = tuple(map(codec.first_token_of, message.first_tokens))

    def _start(self, leg: Leg, message: pb.Start) -> None:
        self._keep_first_tokens(leg, message)
        self._run(leg)

    def _start_fetched(self, leg: Leg, report: FetchReport) -> None:
        self._report_fetched(leg, report)
        leg.kv_wait_s = time.monotonic() - leg.start_at
        self._run(leg)

    def _run(self, leg: Leg) -> None:
        try:
            self._engine.start(leg.key, leg.first_tokens)
        except LookupError:  # the loop has ended it just now; its RequestEnded, with the reason, is on its way
            self._end(leg, None)
        self._on_change()

    def _pull_prefix(self, leg: Leg, status: Status | None) -> None:
        """From the next source that will do; what nobody gives is computed here."""
        leg.fetch_at = leg.fetch_at or time.monotonic()
        arrived = functools.partial(self._handoff.prefix_arrived, leg)
        if self._intake.begin_prefix(leg, self.on_fetch_end, arrived):
            leg.owed.add(Owed.FETCH)
        else:
            self._compute_rest(leg, None)

    def _compute_rest(self, leg: Leg, report: FetchReport | None) -> None:
        try:
            self._engine.compute_rest(leg.key)
        except LookupError:  # its RequestEnded, with the reason, is on its way
            self._end(leg, None)

    def _advance(self, leg: Leg, progress: Progress) -> None:
        self._handoff.advance(leg, progress)

    def _report_done(self, leg: Leg, done: PrefillDone) -> None:
        leg.prefill_done, leg.prefill_done_at = done, time.monotonic()
        leg.start_at = leg.start_at or leg.prefill_done_at
        leg.num_output_tokens += len(done.first_tokens)
        self._reply_done(leg, done)

    def _hold(self, leg: Leg, done: PrefillDone) -> None:
        leg.prefill_done, leg.prefill_done_at = done, time.monotonic()
        self._reply_done(leg, done)  # before the lease moves: the first token is what a client waits for
        self._handoff.finish(leg)
        self._on_change()

    def _reply_done(self, leg: Leg, done: PrefillDone) -> None:
        message = pb.Done(
            key=key_to_proto(leg.key),
            first_tokens=map(codec.first_token_to_proto, done.first_tokens),
            queue_s=done.queue_s,
            prefill_s=done.prefill_s,
            num_cached_tokens=done.num_cached_tokens,
            num_chunks=done.num_chunks,
        )
        leg.outbox.reply(pb.Event(done=message))

    def _renew(self, leg: Leg, message: pb.RenewLease) -> None:
        self._handoff.renew(leg, message.lease_id)

    def _on_run(self, leg: Leg, run: TokenRun) -> None:
        if leg.state is State.RUNNING:
            leg.num_output_tokens += len(run.token_ids)
            if not leg.outbox.add_run(run):
                self.happen(leg, Event.UNREAD, None)

    # ---- actions: ending ----

    def _ignore(self, leg: Leg, subject) -> None:
        """Late, or said before: a command that crossed the key's Ended, an output of a key that is ending."""

    def _refuse_in_use(self, leg: Leg, subject) -> None:
        leg.outbox.reply(codec.refused(leg.key, "in_use", IN_USE_RETRY_S))

    def _end_misplaced(self, leg: Leg, message) -> None:
        self._end(leg, endings.misplaced(type(message).__name__))

    def _end_attach(self, leg: Leg, subject) -> None:
        self._end(leg, endings.ATTACH_UNSUPPORTED)

    def _end_cancelled(self, leg: Leg, subject) -> None:
        self._end(leg, endings.CANCELLED)

    def _end_deadline(self, leg: Leg, subject) -> None:
        self._end(leg, endings.DEADLINE)

    def _end_stream_lost(self, leg: Leg, subject) -> None:
        self._end(leg, endings.STREAM_LOST)

    def _end_unread(self, leg: Leg, subject) -> None:
        self._end(leg, endings.SLOW_READER)

    def _end_draining(self, leg: Leg, subject) -> None:
        self._end(leg, endings.DRAINING)

    def _end_fetch_failed(self, leg: Leg, status: Status | None) -> None:
        self._end(leg, status)

    def _end_with_engine(self, leg: Leg, ended: RequestEnded) -> None:
        self._end(leg, endings.of_engine(ended))

    def _end_lease_lost(self, leg: Leg, ending: str) -> None:
        self._end(leg, endings.LEASE_EXPIRED)

    def _end_lease(self, leg: Leg, ending: str) -> None:
        leg.status = endings.LEASE_OVER[ending]
        self._engine.release_lease(leg.key)
        self._settle(leg, None)

    def _end(self, leg: Leg, status: Status | None) -> None:
        """Gives everything back. The first status counts; None leaves it to the engine's RequestEnded."""
        leg.state = State.ENDING
        leg.status = leg.status or status
        if Owed.ENGINE in leg.owed:
            self._engine.cancel(leg.key)  # before the fetch: its blocks are quarantined until it has settled
        if Owed.FETCH in leg.owed:
            self._intake.stop(leg)
        if Owed.LEASE in leg.owed:
            self._handoff.cancel(leg)
        self._settle(leg, None)

    def _settle(self, leg: Leg, subject) -> None:
        """The one place where a key ends: when the last of what it held is back."""
        if leg.status is None and isinstance(subject, RequestEnded):
            leg.status = endings.of_engine(subject)
        if leg.owed or self.legs.get(leg.key) is not leg:
            return
        self._forget(leg)
        leg.status = leg.status or endings.CANCELLED
        if not leg.is_stream_lost:
            self._report_ended(leg)
        self._on_ended(leg)
        self._on_change()

    def _report_ended(self, leg: Leg) -> None:
        if leg.num_matched_tokens is None:
            report = leg.report if leg.start_at is not None else None
            leg.outbox.end(codec.ended(leg.key, leg.status, report, leg.kv_wait_s))
        else:
            not_here = pb.NotHere(key=key_to_proto(leg.key), num_matched_tokens=leg.num_matched_tokens)
            leg.outbox.reply(pb.Event(not_here=not_here))

    def _forget(self, leg: Leg) -> None:
        del self.legs[leg.key]
        leg.state = State.ABSENT
        if leg.timer is not None:
            leg.timer.cancel()
