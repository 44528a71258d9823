"""The link to one worker: what is known of the worker, and the dispatch of its events to legs.

All legs of a request post into the request's one `Mailbox`, so the request waits in one place. When the session is
lost, every leg gets `Lost`. Events of keys that are not open here are dropped.
"""

import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum

from baton.protocol import PROTOCOL, adapter_feature
from baton.service.clock import now
from baton.service.codec import key_from_proto
from baton.service.logs import fields, printable
from baton.service.security.access import Access
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import EventSink, Lost, Rejoined, Stalled
from gateway.link.token_batching import MessageTurns, TokenBatching
from gateway.link.worker_breaker import WorkerBreaker
from gateway.link.worker_clock import WorkerClock
from gateway.link.worker_leg import Key, WorkerLeg
from gateway.link.worker_session import WorkerSession
from gateway.routing.latency_model import PaceEstimator, RecentLoad
from gateway.routing.routing import WorkerLimits

_MAX_REASON_CHARS = 500

log = logging.getLogger(__name__)


class LinkState(Enum):
    """The state of the session with a worker."""

    CONNECTING = "connecting"
    SERVING = "serving"
    DRAINING = "draining"
    STALLED = "stalled"
    LEFT = "left"  # the worker drained and went, and has not come back
    REFUSED = "refused"  # the worker answered, but cannot be used; `reason` says why

    @property
    def has_session(self) -> bool:
        """Return whether there is a session with the worker."""
        return self in (LinkState.SERVING, LinkState.DRAINING, LinkState.STALLED)


_COMING = (LinkState.CONNECTING, LinkState.LEFT, LinkState.DRAINING, LinkState.STALLED)


class WorkerLink:
    """The state, load and open legs of one worker; `session.run()` keeps the session. Belongs to the event loop."""

    def __init__(
        self,
        address: str,
        instance: bytes,
        *,
        on_hello: Callable[["WorkerLink", pb.Hello], str | None],
        on_change: Callable[["WorkerLink"], None],
        on_block_events: Callable[["WorkerLink", pb.BlockEvents], None],
        max_unread_tokens: int,
        access: Access = Access(),
        batching: TokenBatching | None = None,
    ):
        """`instance` identifies this link to the worker, which ends the older of two sessions with one instance.
        `on_hello` accepts the worker and returns None, or returns why it is refused. `on_change` is called after each
        change that others may see. `batching` is shared by all links of the gateway."""
        self.address = address
        self.hello: pb.Hello | None = None
        self.limits: WorkerLimits | None = None  # the limits that it reported; kept while it is away
        self.load = pb.Load()
        self.state = LinkState.CONNECTING
        self.reason = "not connected yet"
        self._away_since = now()
        self.num_failed_sessions = 0  # sessions in a row that ended before a Hello
        self.legs: dict[Key, WorkerLeg] = {}
        self.max_unread_tokens = max_unread_tokens
        self.pace_estimator = PaceEstimator()  # replaced by one of the model's fleet once the model is known
        self.recent_load = RecentLoad()
        self.prefill_tokens: Counter[str] = Counter()  # by tenant: prompt tokens of all legs that wait to be read
        self.slo_tpots_s: Counter[float] = Counter()  # SLO in seconds per token -> number of legs with it
        self.breaker = WorkerBreaker()
        self.num_asked = 0  # legs that have sent Admit or Prefill, and have shown no work yet
        self._known_id = b""
        self.started_at = 0.0  # when the worker said its first Hello (time.monotonic())
        self._turns = MessageTurns(batching or TokenBatching())
        self.clock = WorkerClock()
        self.session = WorkerSession(address, instance, access, self)
        self._on_hello = on_hello
        self._on_change = on_change
        self._on_block_events = on_block_events
        self._is_refused = False  # whether the worker of the current session was refused

    @property
    def is_serving(self) -> bool:
        """Return whether the worker takes requests."""
        return self.state is LinkState.SERVING

    @property
    def worker_id(self) -> bytes:
        """The worker's instance and epoch, so a restarted worker has another id; empty without a session."""
        return worker_id_of(self.hello) if self.hello else b""

    @property
    def is_reconnecting(self) -> bool:
        """Return whether the session has ended, and no attempt to begin another has failed yet."""
        return self.hello is None and self.num_failed_sessions == 0

    def may_come(self, within_s: float) -> bool:
        """Return whether the worker may serve soon: it was lost, left, drains or stalls since less than `within_s`."""
        return self.state in _COMING and now() - self._away_since < within_s

    def is_missed(self, within_s: float) -> bool:
        """Return whether the worker has served and was lost less than `within_s` ago; one that drained has left."""
        is_lost = self.state is LinkState.CONNECTING and self.limits is not None
        return is_lost and now() - self._away_since < within_s

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that this gateway sent and that wait to be read on the worker."""
        return self.prefill_tokens.total()

    @property
    def name(self) -> str:
        """A short name for logs; without a session it is the name of the last worker at this address."""
        return self._known_id.hex()[:8] or self.address

    def open(self, key: Key, mailbox: EventSink, tenant: str = "") -> WorkerLeg:
        """Return a new leg for `key`, whose events go into `mailbox`."""
        leg = self.legs[key] = WorkerLeg(self, key, mailbox, tenant)
        return leg

    def drop_leg(self, leg: WorkerLeg) -> None:
        """Drop the events of a leg from now on."""
        if self.legs.get(leg.key) is leg:
            del self.legs[leg.key]

    def add_prefill_tokens(self, tenant: str, num: int) -> None:
        """Count prompt tokens that begin (or, if negative, cease) to wait on the worker."""
        self.prefill_tokens[tenant] += num
        if not self.prefill_tokens[tenant]:
            del self.prefill_tokens[tenant]

    def add_slo(self, tpot_s: float) -> None:
        """Count a leg whose SLO allows `tpot_s` seconds per token."""
        self.slo_tpots_s[tpot_s] += 1

    def remove_slo(self, tpot_s: float) -> None:
        """Count a leg that was added by `add_slo` no more."""
        self.slo_tpots_s[tpot_s] -= 1
        if not self.slo_tpots_s[tpot_s]:
            del self.slo_tpots_s[tpot_s]

    def note_hello(self, hello: pb.Hello) -> None:
        """Keep the worker's Hello for the session, and its limits also after the session."""
        limits = hello.limits
        sizes = limits.max_model_len, limits.num_blocks, limits.block_size
        held = (adapter_feature(adapter.identity) for adapter in hello.adapters)
        self.hello, self.limits = hello, WorkerLimits(*sizes, frozenset((*hello.features, *held)))
        if self.worker_id != self._known_id:
            self._known_id, self.breaker, self.started_at = self.worker_id, WorkerBreaker(), now()

    def note_worked(self, asked_at: float) -> None:
        """Tell the breaker of work on a request that was sent at `asked_at` (time.monotonic())."""
        if self.breaker.note_work(asked_at):
            self._on_change(self)

    def note_failure(self, what: str) -> None:
        """Tell the breaker that a request got no answer, or ended for no reason of its own."""
        if self.breaker.note_failure(now()):
            pause_s = self.breaker.retry_at - now()
            log.warning("worker set aside %s", fields(worker=self.name, address=self.address, what=what, for_s=pause_s))
            self._on_change(self)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Add a sample to the pace estimate: the worker computed `num_tokens` of a prompt in `seconds`."""
        self.pace_estimator.note_prefill(num_tokens, seconds, now())

    def subscribe(self) -> None:
        """Ask the worker for events of its prefix cache; a snapshot comes first."""
        self.session.send(pb.Command(subscribe=pb.Subscribe()))

    # ---- the session ----

    def accept_hello(self, hello: pb.Hello) -> str | None:
        """Accept or refuse the worker by its Hello. Return why it is refused, or None if it is accepted."""
        if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
            reason = f"speaks protocol {hello.protocol_min} to {hello.protocol_max}, this gateway {PROTOCOL}"
        else:
            reason = self._on_hello(self, hello)
        if reason:
            self._refuse(reason)
        return reason

    def _refuse(self, reason: str) -> None:
        if self.state is not LinkState.REFUSED:
            log.warning("worker refused %s", fields(address=self.address, reason=reason))
        self.limits, self._is_refused = None, True
        self._become(LinkState.REFUSED, reason)

    def join(self, hello: pb.Hello) -> None:
        """Begin a session; legs that are open may continue."""
        self.note_hello(hello)
        self.load = pb.Load(state="")
        self._become(LinkState.SERVING, "")
        log.info("worker joined %s", fields(worker=self.name, address=self.address, roles=",".join(hello.roles)))
        for leg in list(self.legs.values()):
            leg.post(Rejoined())

    def lose(self, reason: str) -> None:
        """End the session, or the failed attempt to begin one, and post Lost to all legs."""
        self.num_failed_sessions = 0 if self.hello is not None else self.num_failed_sessions + 1
        has_left = self.state in (LinkState.DRAINING, LinkState.LEFT)
        if self.hello is not None:
            write, what = (log.info, "left") if has_left else (log.warning, "lost")
            write("worker %s %s", what, fields(worker=self.name, address=self.address, reason=reason))
        legs, self.legs = list(self.legs.values()), {}
        for leg in legs:
            leg.post(Lost(reason))
        if has_left:
            self._become(LinkState.LEFT, "it drained" if self.hello is not None else f"it drained; since then {reason}")
        # A Load that arrived after the refusal may have set another state.
        elif not self._is_refused or self.state is not LinkState.REFUSED:
            self._become(LinkState.CONNECTING, reason)
        self.hello, self.load, self.clock, self._is_refused = None, pb.Load(), WorkerClock(), False

    def _become(self, state: LinkState, reason: str) -> None:
        # A worker that drained or stalled for long and then went counts as away from now on only.
        has_gone = state in (LinkState.CONNECTING, LinkState.LEFT) and state is not self.state
        if has_gone or (state in _COMING and self.state not in _COMING):
            self._away_since = now()
        self.state, self.reason = state, printable(reason[:_MAX_REASON_CHARS])  # the text may come from a worker
        self._on_change(self)

    # ---- events ----

    def on_event(self, event: pb.Event) -> None:
        """Handle one event of the session."""
        kind = event.WhichOneof("kind")
        if kind == "step_output":
            self._dispatch_tokens(event.step_output)
        elif kind == "load":
            self._set_load(event.load)
        elif kind == "block_events":
            self._on_block_events(self, event.block_events)
        elif kind == "hello":
            self._hear_again(event.hello)
        elif kind is not None:
            message = getattr(event, kind)
            if leg := self.legs.get(key_from_proto(message.key)):
                self._rate(leg, kind, message)
                if kind in ("ended", "refused"):
                    del self.legs[leg.key]
                leg.post(message)
            if kind in ("done", "ended"):
                self._on_change(self)  # the worker may have room for a request that waits

    def _hear_again(self, hello: pb.Hello) -> None:
        """Handle a further Hello in a session, by which a worker reports new adapters."""
        if self.hello is None or (hello.instance, hello.epoch) != (self.hello.instance, self.hello.epoch):
            log.warning("worker said the Hello of another, which is ignored %s", fields(worker=self.name))
        elif reason := self.accept_hello(hello):
            self.session.hang_up(reason)
        else:
            self.note_hello(hello)
            self._on_change(self)

    def _rate(self, leg: WorkerLeg, kind: str, message) -> None:
        if kind == "fetched":
            num_late = message.num_bytes - message.num_bytes_early
            self.pace_estimator.note_transfer(max(0, num_late), message.after_last_ready_s, now())
        elif kind == "ended" and leg.num_written:
            num_beside = max(self.load.num_running, len(self.legs))
            self.pace_estimator.note_decode(num_beside, message.decode.decode_s / leg.num_written, now())

    def _set_load(self, load: pb.Load) -> None:
        self.load = load
        if load.wall_time_ns and (beat := self.clock.compare(load)) is not None:
            self.session.send(pb.Command(beat=beat))
        state = {"draining": LinkState.DRAINING, "stalled": LinkState.STALLED}.get(load.state, LinkState.SERVING)
        self._become(state, "" if state is LinkState.SERVING else load.state)
        # Posted with each report, since another worker may have come to serve meanwhile.
        for leg in list(self.legs.values()) if state is LinkState.STALLED else ():
            leg.post(Stalled())

    def _dispatch_tokens(self, output: pb.StepOutput) -> None:
        legs = [self.legs.get((key.request_id, key.attempt)) for key in output.keys]
        token_ids, logprobs = list(output.token_ids), output.logprobs
        columns = (output.key_index, output.choice, output.first_index, output.num_ids, output.has_logprobs)
        token_at = logprob_at = 0
        due, held, turns = [], [], self._turns
        turns.begin(len(token_ids))
        for index, choice, first, num_ids, has_logprobs, reason in zip(*columns, output.finish_reason, strict=True):
            num_logprobs = num_ids if has_logprobs else 0
            if leg := legs[index]:
                ids = token_ids[token_at : token_at + num_ids]
                its_logprobs = list(logprobs[logprob_at : logprob_at + num_logprobs]) if has_logprobs else []
                is_due = leg.post_tokens(choice, first, ids, its_logprobs, reason) or turns.is_turn_of(leg.turn_id)
                (due if is_due else held).append(leg.mailbox)
            token_at += num_ids
            logprob_at += num_logprobs
        turns.end(due, held)


def worker_id_of(hello: pb.Hello) -> bytes:
    """Return the id of the worker that sent this Hello."""
    return hello.instance + hello.epoch.to_bytes(8, "little")
