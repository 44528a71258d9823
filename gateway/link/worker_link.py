"""One WorkerLink per worker: a session stream that reconnects with growing pauses, and the events of each leg.

All legs of a request post into the request's one `Mailbox`, so it waits in one place. When the stream is lost,
every leg gets `Lost`; events of keys that are not open here are dropped.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial

import grpc

from baton.protocol import PROTOCOL, adapter_feature
from baton.service.clock import now
from baton.service.codec import key_from_proto
from baton.service.logs import fields, printable
from baton.service.net.client import connect, open_channel
from baton.service.net.in_process import InProcessChannel, channel_to
from baton.service.security.access import Access
from baton.service.security.tls import WORKER_NAME
from baton.tasks import cancel_call, is_cancelled
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from gateway.link.mailbox import EventSink, Lost, Rejoined, Stalled
from gateway.link.session_writer import start_writer
from gateway.link.token_batching import MessageTurns, TokenBatching
from gateway.link.worker_breaker import WorkerBreaker
from gateway.link.worker_clock import WorkerClock
from gateway.link.worker_leg import Key, WorkerLeg
from gateway.routing.latency_model import PaceEstimator, RecentLoad
from gateway.routing.routing import WorkerLimits

_HELLO_TIMEOUT_S = 5.0
_MAX_REASON_CHARS = 500
SILENCE_S = 2.25  # loads come four times a second; a longer silence is a dead session
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_STARTING_S, _STARTING_PAUSE_S = 30.0, 0.4  # one that has gone a moment ago is starting again: requests wait for it

log = logging.getLogger(__name__)


class LinkState(Enum):
    """The state of the session with a worker."""

    CONNECTING = "connecting"
    SERVING = "serving"
    DRAINING = "draining"
    STALLED = "stalled"
    REFUSED = "refused"  # it answered, and is not one of ours; `reason` says why


_COMING = (LinkState.CONNECTING, LinkState.DRAINING, LinkState.STALLED)


class WorkerLink:
    """Belongs to the event loop. `run()` keeps the session."""

    def __init__(
        self,
        address: str,
        instance: bytes,
        *,
        check_hello: Callable[["WorkerLink", pb.Hello], str | None],
        on_change: Callable[["WorkerLink"], None],
        on_block_events: Callable[["WorkerLink", pb.BlockEvents], None],
        max_unread_tokens: int,
        access: Access = Access(),
        batching: TokenBatching | None = None,
    ):
        """`instance`: names this link to its worker, which ends the older of two sessions of one name. `check_hello` returns
        why this worker cannot be used, or None; `on_change` is called when what others see has changed. `batching`: of all
        tokens that this gateway receives."""
        self.address = address
        self.hello: pb.Hello | None = None
        self.limits: WorkerLimits | None = None  # its reported limits; kept while it is away
        self.load = pb.Load()
        self.state = LinkState.CONNECTING
        self.reason = "not connected yet"
        self._away_since = now()
        self.num_vain = 0  # sessions in a row that ended before a Hello
        self.legs: dict[Key, WorkerLeg] = {}
        self.max_unread_tokens = max_unread_tokens
        self.pace_estimator = PaceEstimator()  # among those of its model, once that is known
        self.recent_load = RecentLoad()
        self.prefill_tokens: Counter[str] = Counter()  # of all legs, by tenant
        self.slo_tpots_s: Counter[float] = Counter()  # by SLO: seconds a token -> legs
        self.breaker = WorkerBreaker()
        self.num_asked = 0  # legs that were asked to take a request, and have shown no work
        self._known_id = b""
        self.started_at = 0.0  # its first Hello
        self._turns = MessageTurns(batching or TokenBatching())
        self.clock = WorkerClock()
        self._instance = instance
        self._access = access
        self._check_hello = check_hello
        self._on_change = on_change
        self._on_block_events = on_block_events
        self._outbox: asyncio.Queue[pb.Command | None] | None = None
        self._silence: asyncio.Timeout | None = None  # of the session that is up
        self._ended_for = ""  # why this gateway ended it
        self._is_refused = False  # who answered last, and may be there still
        self._was_heard, self._heard_at = False, 0.0

    @property
    def is_serving(self) -> bool:
        """Return whether it takes requests."""
        return self.state is LinkState.SERVING

    @property
    def worker_id(self) -> bytes:
        """Instance and epoch, empty without a session: a restarted worker is another one."""
        return worker_id_of(self.hello) if self.hello else b""

    @property
    def is_reconnecting(self) -> bool:
        """Return whether its session has ended, and another was not tried in vain yet."""
        return self.hello is None and self.num_vain == 0

    def may_come(self, within_s: float) -> bool:
        """Return whether it may yet serve: it has not been away for longer than `within_s`, as one that starts is."""
        return self.state in _COMING and now() - self._away_since < within_s

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of this gateway that wait to be read there."""
        return self.prefill_tokens.total()

    @property
    def name(self) -> str:
        """A short name for logs; it stays that of the last worker that was here."""
        return self._known_id.hex()[:8] or self.address

    def open(self, key: Key, mailbox: EventSink, tenant: str = "") -> WorkerLeg:
        """Return a new leg for `key`, whose events go into `mailbox`."""
        leg = self.legs[key] = WorkerLeg(self, key, mailbox, tenant)
        return leg

    def send(self, command: pb.Command) -> None:
        """Queue a command for the session; without one it is dropped, since its legs have got Lost."""
        if self._outbox is not None:
            self._outbox.put_nowait(command)

    def note_hello(self, hello: pb.Hello) -> None:
        """Keep what the worker says of itself for the session, and its limits for longer."""
        limits = hello.limits
        sizes = limits.max_model_len, limits.num_blocks, limits.block_size
        held = (adapter_feature(adapter.identity) for adapter in hello.adapters)
        self.hello, self.limits = hello, WorkerLimits(*sizes, frozenset((*hello.features, *held)))
        if self.worker_id != self._known_id:
            self._known_id, self.breaker, self.started_at = self.worker_id, WorkerBreaker(), now()

    def note_worked(self, asked_at: float) -> None:
        """Tell the breaker of work on a request that was asked for at `asked_at` (time.monotonic())."""
        if self.breaker.note_work(asked_at):
            self._on_change(self)

    def note_failure(self, what: str) -> None:
        """Tell the breaker that a request got no answer, or ended without a reason of its own."""
        if self.breaker.note_failure(now()):
            pause_s = self.breaker.retry_at - now()
            log.warning("worker set aside %s", fields(worker=self.name, address=self.address, what=what, for_s=pause_s))
            self._on_change(self)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Count a measurement: computing `num_tokens` of a prompt took `seconds`."""
        self.pace_estimator.note_prefill(num_tokens, seconds, now())

    def subscribe(self) -> None:
        """Ask for index events: a snapshot comes first."""
        self.send(pb.Command(subscribe=pb.Subscribe()))

    async def run(self) -> None:
        """Connect, serve the session, and again after a pause; until cancelled."""
        pause_s = _FIRST_PAUSE_S
        if self.hello is not None:
            self._lose("its session has failed")  # and this task begins again
        while True:
            connected_at, self._is_refused = now(), False
            try:
                own = channel_to(self.address)  # where the worker is in this process
                async with own or open_channel(self.address, self._access, WORKER_NAME) as channel:
                    failure = None if own else await _connection_failure(channel)
                    reason = failure or await self._session(channel)
            except OSError as error:  # a certificate that is not there for a moment
                reason = f"{error.filename}: {error.strerror}"
            was_up = self.hello is not None
            self.num_vain = 0 if was_up else self.num_vain + 1
            self._lose(reason)
            if was_up and now() - connected_at > pause_s:  # no worker that dies of each session
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            longest_s = _STARTING_PAUSE_S if self.may_come(_STARTING_S) else _LONGEST_PAUSE_S
            pause_s = min(2 * pause_s, longest_s)

    async def _session(self, channel: grpc.aio.Channel | InProcessChannel) -> str:
        """Serve one stream to its end; return why it ended."""
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        outbox = asyncio.Queue()
        hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, instance=self._instance)
        outbox.put_nowait(pb.Command(hello=hello))
        self._ended_for = ""
        writer = start_writer(call, outbox, self.address, partial(self.hang_up, "nothing can be sent to it"))
        try:
            return await self._read(call, outbox)
        except TimeoutError:
            return self._ended_for or "no word from it"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.note_failure("it sent more than a message may have")
            return _described(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "its stream was cancelled"
        except Exception as error:  # whatever it sent, the next session may do better
            log.exception("malformed event %s", fields(address=self.address))
            self.note_failure("it sent a malformed event")
            return f"it sent a malformed event: {error}"
        finally:
            self._outbox = None
            writer.cancel()
            cancel_call(call)
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, call, outbox: asyncio.Queue) -> str:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("kind") != "hello":
            return "it did not say Hello"
        if reason := self._refusal(first.hello):
            return reason
        self._outbox, self._ended_for = outbox, ""
        self.note_hello(first.hello)
        self.load = pb.Load(state="")
        self._become(LinkState.SERVING, "")
        log.info("worker joined %s", fields(worker=self.name, address=self.address, roles=",".join(first.hello.roles)))
        for leg in list(self.legs.values()):
            leg.post(Rejoined())
        try:
            async with asyncio.timeout(None) as self._silence:
                while (event := await call.read()) is not grpc.aio.EOF:
                    self._was_heard = True
                    self._dispatch(event)
        finally:
            self._silence = None
        return "it closed the session"

    def hang_up(self, why: str) -> None:
        """End the session without ending its legs: what decodes there is parked until a gateway attaches."""
        self._outbox, self._ended_for = None, why
        if self._silence is not None:
            self._silence.reschedule(asyncio.get_running_loop().time())

    def check_silence(self, running_s: float) -> None:
        """End the session if nothing has come for SILENCE_S. It is called regularly; `running_s` is a clock that pauses
        while this process does."""
        if self._was_heard or self._silence is None:
            self._was_heard, self._heard_at = False, running_s
        elif running_s - self._heard_at > SILENCE_S:
            self._silence.reschedule(asyncio.get_running_loop().time())
            self._heard_at = running_s

    def _refusal(self, hello: pb.Hello) -> str | None:
        if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
            reason = f"speaks protocol {hello.protocol_min} to {hello.protocol_max}, this gateway {PROTOCOL}"
        else:
            reason = self._check_hello(self, hello)
        if reason and self.state is not LinkState.REFUSED:
            log.warning("worker refused %s", fields(address=self.address, reason=reason))
        if reason:
            self.limits, self._is_refused = None, True
            self._become(LinkState.REFUSED, reason)
        return reason

    def _lose(self, reason: str) -> None:
        if self.hello is not None:
            tell, what = (log.info, "left") if self.state is LinkState.DRAINING else (log.warning, "lost")
            tell("worker %s %s", what, fields(worker=self.name, address=self.address, reason=reason))
        legs, self.legs = list(self.legs.values()), {}
        for leg in legs:
            leg.post(Lost(reason))
        if not self._is_refused or self.state is not LinkState.REFUSED:  # a load that came behind it had it serve again
            self._become(LinkState.CONNECTING, reason)
        self.hello, self.clock = None, WorkerClock()

    def _become(self, state: LinkState, reason: str) -> None:
        # One that drained or stalled for long, and then went, starts again from here.
        has_gone = state is LinkState.CONNECTING is not self.state
        if has_gone or (state in _COMING and self.state not in _COMING):
            self._away_since = now()
        self.state, self.reason = state, printable(reason[:_MAX_REASON_CHARS])  # may come from a worker
        self._on_change(self)

    # ---- events ----

    def _dispatch(self, event: pb.Event) -> None:
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
                self._on_change(self)  # there may be room for a request that waits

    def _hear_again(self, hello: pb.Hello) -> None:
        """Take what a worker says anew of itself: its adapters."""
        if self.hello is None or (hello.instance, hello.epoch) != (self.hello.instance, self.hello.epoch):
            log.warning("worker said the Hello of another, which is ignored %s", fields(worker=self.name))
        elif reason := self._refusal(hello):
            self.hang_up(reason)
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
            self.send(pb.Command(beat=beat))
        state = {"draining": LinkState.DRAINING, "stalled": LinkState.STALLED}.get(load.state, LinkState.SERVING)
        self._become(state, "" if state is LinkState.SERVING else load.state)
        # Each time, for another worker may come to serve meanwhile.
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
                is_due = leg.post_tokens(choice, first, ids, its_logprobs, reason) or turns.is_turn_of(leg.place)
                (due if is_due else held).append(leg.mailbox)
            token_at += num_ids
            logprob_at += num_logprobs
        turns.end(due, held)


def worker_id_of(hello: pb.Hello) -> bytes:
    """Return the id of the worker that says this."""
    return hello.instance + hello.epoch.to_bytes(8, "little")


async def _connection_failure(channel: grpc.aio.Channel) -> str | None:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            await connect(channel)
    except TimeoutError:
        return "no word from it"
    except grpc.aio.AioRpcError as error:
        return _described(error)
    return None


def _described(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
