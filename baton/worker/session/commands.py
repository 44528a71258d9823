"""The commands of all sessions, and what happens beside them, as events of their keys: how keys open and go on.

Belongs to the event loop. Calls into the engine's ledger are answered at once; the engine's outputs come in batches.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

from baton import failpoints
from baton.engine.core.request import Key, Output, PrefillDone, Progress, Refusal, Request, TokenRun
from baton.engine.engine import Engine
from baton.service.codec import deadline_of, key_from_proto, key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.kv.handoff import Handoff
from baton.worker.kv.intake import Intake
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.states import OPENING, KeyEvent, KeyState
from baton.worker.legs.token_record import TokenRecord
from baton.worker.session.keys import IN_USE_RETRY_S
from baton.worker.session.parking import Parking
from baton.worker.wire import end_status, messages
from baton.worker.wire.end_status import Status
from baton.worker.wire.outbox import Outbox
from kvtransfer.errors import LeaseExpired
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.fetcher import FetchReport
from kvtransfer.wire import Taker

DRAINING_RETRY_S = 1.0
MAX_ID_CHARS = 256

_COMMAND_EVENTS = {
    "admit": KeyEvent.ADMIT,
    "fetch": KeyEvent.FETCH,
    "start": KeyEvent.START,
    "offer": KeyEvent.OFFER,
    "cancel": KeyEvent.CANCEL,
    "renew_lease": KeyEvent.RENEW,
}


class Commands(Parking):
    """All live keys of one worker."""

    def __init__(self, engine: Engine, handoff: Handoff, intake: Intake, *args):
        """`args` as of Keys."""
        super().__init__(engine, handoff, intake, *args)
        self.is_draining = False
        handoff.on_over = self.on_lease_over

    # ---- what comes in ----

    def obey(self, outbox: Outbox, command: pb.Command) -> None:
        """One command with a key, from the session that `outbox` belongs to."""
        kind = command.WhichOneof("kind")
        message = getattr(command, kind)
        if kind == "attach":
            self._obey_attach(outbox, message)
            return
        if kind == "prefill":
            event = KeyEvent.PREFILL if message.HasField("taker") else KeyEvent.PREFILL_HERE
        else:
            event = _COMMAND_EVENTS[kind]
        key = Key(*key_from_proto(message.key))
        leg = self.legs.get(key) or Leg(key, outbox)
        if leg.key not in self.legs and self.legs.is_taken(key):  # it goes on by another name
            if event in OPENING:
                self._refuse_in_use(leg, None)
        elif leg.outbox is outbox:
            self.happen(leg, event, message)
        elif event in OPENING:  # another gateway's key, by accident: that one goes on
            outbox.reply(messages.refused(key, "in_use", IN_USE_RETRY_S))

    def _obey_attach(self, outbox: Outbox, attach: pb.Attach) -> None:
        """It comes by a key of its own, and happens to the one that it is meant for."""
        leg = Leg(Key(*key_from_proto(attach.key)), outbox)
        if self.legs.is_taken(leg.key):
            self._refuse_in_use(leg, None)
        else:
            found = None if self.is_draining else self.legs.attachable(attach)
            self.happen(found or leg, KeyEvent.ATTACH, (outbox, attach))

    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """What one step of the engine gave out."""
        for output in outputs:
            leg = self.legs.of_engine(output.key)
            if leg is None:
                continue
            if isinstance(output, TokenRun):
                self._act(leg, self._on_run, output)
            elif isinstance(output, Progress):
                self.happen(leg, KeyEvent.PROGRESS, output)
            elif isinstance(output, PrefillDone):
                self.happen(leg, KeyEvent.PREFILL_DONE, output)
            else:
                leg.owed.discard(Owed.ENGINE)
                leg.report = output.report
                self.happen(leg, KeyEvent.ENGINE_ENDED, output)

    def on_fetch_end(self, leg: Leg, outcome: FetchReport | Status | None) -> None:
        """No byte of the key's fetch can land any more. None: the engine has ended the key, and says why."""
        leg.owed.discard(Owed.FETCH)
        leg.fetch_ended_at = time.monotonic()
        if isinstance(outcome, FetchReport):
            leg.fetch_report = outcome
            self.happen(leg, KeyEvent.FETCHED, outcome)
        else:
            self.happen(leg, KeyEvent.FETCH_FAILED, outcome)

    def on_lease_over(self, key: Key, ending: str) -> None:
        """The takers have all they wanted, or never will; `ending` in the source's words."""
        leg = self.legs.get(key)
        if leg is not None and Owed.LEASE in leg.owed:
            leg.owed.discard(Owed.LEASE)
            self.happen(leg, KeyEvent.LEASE_OVER, ending)

    def on_stream_lost(self, outbox: Outbox) -> None:
        """What decodes is parked for whoever attaches; all else that came through this session is given up."""
        for leg in self.legs.of_session(outbox):
            leg.is_stream_lost = True
            self.happen(leg, KeyEvent.STREAM_LOST, None)

    def on_read(self, key: Key) -> None:
        """The gateway has read what was too much of a sequence."""
        if (leg := self.legs.get(key)) is not None:
            self.happen(leg, KeyEvent.READ, None)

    def start_draining(self) -> None:
        """Nothing new from here on."""
        self.is_draining = True
        self._on_change()

    def on_grace_over(self) -> None:
        """The worker must go: whatever still runs ends."""
        for leg in list(self.legs.values()):
            self.happen(leg, KeyEvent.GRACE_OVER, None)

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
        leg.is_prefill = True
        if leg.request is not None:  # admitted, perhaps with what a chain of spans has brought
            self._compute_rest(leg, None)
        else:
            self._engine.submit(self._open(leg, message.spec))
            leg.owed.add(Owed.ENGINE)
        self._on_change()

    def _offer(self, leg: Leg, message: pb.Offer) -> None:
        """Also of a worker that drains: who takes over asks for what is here."""
        _check_key(leg)
        self._set_deadline(leg, deadline_of(message.budget_ms))
        taker = self._handoff.taker_of(message.taker)
        if message.WhichOneof("what") == "lease_id":
            self._offer_again(leg, message.lease_id, taker)
            return
        hashes = messages.chain_of(message.spans)
        acceptance = self._engine.offer(leg.key, hashes)
        if acceptance.blocks:
            leg.owed.add(Owed.ENGINE)
        if acceptance.num_cached_tokens < len(hashes) * SPAN_TOKENS:
            leg.num_matched_tokens = acceptance.num_cached_tokens
            self._end(leg, end_status.OK)
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
            self._end(leg, end_status.OK)
            return
        leg.owed.add(Owed.LEASE)
        leg.outbox.reply(pb.Event(offered=pb.Offered(key=key_to_proto(leg.key), **offer)))

    def _open(self, leg: Leg, spec: pb.RequestSpec) -> Request:
        """The request of a new key, checked; nothing is allocated yet."""
        self._check_open(leg)
        request = messages.request_of(leg.key, spec, self._engine.spec.vocab_size)
        self._set_deadline(leg, request.deadline)
        leg.request, leg.fingerprint = request, spec.fingerprint
        return request

    def _check_open(self, leg: Leg) -> None:
        if self.is_draining:
            raise Refusal("draining", DRAINING_RETRY_S)
        _check_key(leg)

    # ---- actions: going on ----

    def _fetch(self, leg: Leg, message: pb.Fetch) -> None:
        leg.fetch_at = time.monotonic()
        self._intake.begin(leg, message.handle, message.ticket, self.on_fetch_end)
        leg.owed.add(Owed.FETCH)

    def _report_fetched(self, leg: Leg, report: FetchReport) -> None:
        leg.outbox.reply(messages.fetched(leg.key, report))

    def _keep_first_tokens(self, leg: Leg, message: pb.Start) -> None:
        leg.start_at = time.monotonic()
        num_choices, vocab_size = leg.request.sampling.n, self._engine.spec.vocab_size
        leg.first_tokens = messages.first_tokens_of(message.first_tokens, num_choices, vocab_size)

    def _start(self, leg: Leg, message: pb.Start) -> None:
        self._keep_first_tokens(leg, message)
        self._run(leg)

    def _start_fetched(self, leg: Leg, report: FetchReport) -> None:
        self._report_fetched(leg, report)
        leg.kv_wait_s = time.monotonic() - leg.start_at
        self._run(leg)

    def _run(self, leg: Leg) -> None:
        failpoints.hit("decode.start")
        try:
            leg.record = TokenRecord(leg.request, leg.first_tokens)
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
        leg.record = TokenRecord(leg.request, done.first_tokens)
        self._reply_done(leg, done)

    def _hold(self, leg: Leg, done: PrefillDone) -> None:
        leg.prefill_done, leg.prefill_done_at = done, time.monotonic()
        self._reply_done(leg, done)  # before the lease moves: the first token is what a client waits for
        self._handoff.finish(leg)
        self._on_change()

    def _reply_done(self, leg: Leg, done: PrefillDone) -> None:
        failpoints.hit("prefill.done")
        leg.outbox.reply(messages.done(leg.key, done))

    def _renew(self, leg: Leg, message: pb.RenewLease) -> None:
        self._handoff.renew(leg, message.lease_id)

    def _on_run(self, leg: Leg, run: TokenRun) -> None:
        """A step that was under way still counts when its key is parked."""
        if leg.state not in (KeyState.RUNNING, KeyState.PARKED, KeyState.ORPHANED):
            return
        failpoints.hit("decode.tokens")
        leg.num_output_tokens += len(run.token_ids)
        leg.record.add(run)
        if leg.state is KeyState.ORPHANED:
            return
        has_room = leg.outbox.add_run(run if run.key == leg.key else replace(run, key=leg.key))
        if not has_room and leg.state is KeyState.RUNNING:
            self.happen(leg, KeyEvent.UNREAD, None)


def _check_key(leg: Leg) -> None:
    if not 1 <= len(leg.key.request_id) <= MAX_ID_CHARS:
        raise ValueError(f"key.request_id has {len(leg.key.request_id)} characters: 1 to {MAX_ID_CHARS}")
