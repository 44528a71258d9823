"""One WorkerLink per worker: a session stream that reconnects with growing pauses, and the events of each key.

A key's leg on a worker is a `Leg`; both legs of a request post into the request's one `Mailbox`, so the pipeline waits
in one place. Losing the stream posts `Lost` to every leg; events of keys that nobody has open are dropped.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import grpc

from baton.service.client import open_channel
from baton.service.codec import key_from_proto, key_to_proto
from baton.service.logs import fields
from baton.v1 import inference_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from gateway.timing import now

PROTOCOL = 1
_HELLO_TIMEOUT_S = 5.0
_SILENCE_S = 10.0  # loads come four times a second; a longer silence is a dead session
_RATED_TOKENS = 128  # less says more of the round trips than of the rate
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0

log = logging.getLogger(__name__)
Key = tuple[str, int]


class LinkState(Enum):
    CONNECTING = "connecting"
    SERVING = "serving"
    DRAINING = "draining"
    STALLED = "stalled"
    REFUSED = "refused"  # it answered, and is not one of ours; `reason` says why


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is gone, and with it this leg."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """One row of a StepOutput: tokens of one choice, in order."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[inference_pb2.Logprobs, ...]
    finish_reason: int


class Overflow:
    """More tokens are unread than the bound allows; the leg was cancelled."""


class Mailbox:
    """What the legs of one request have to say, in order of arrival. One reader."""

    def __init__(self) -> None:
        self._entries: deque = deque()
        self._arrived = asyncio.Event()

    def post(self, leg: "Leg | None", event) -> None:
        self._entries.append((leg, event))
        self._arrived.set()

    def take(self):
        """(leg, event), or None when nothing is there."""
        return self._entries.popleft() if self._entries else None

    async def next(self, timeout_s: float):
        """(leg, event), or None after `timeout_s`."""
        if not self._entries:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        return self.take()


class Leg:
    """One key on one worker. `close()` whenever done with it: what is still alive there is cancelled."""

    def __init__(self, link: "WorkerLink", key: Key, mailbox: Mailbox):
        self.link, self.key = link, key
        self.num_unread = 0
        self.num_prefill_tokens = 0  # of its prompt, while it waits to be read there
        self._mailbox = mailbox
        self._open = True

    def send(self, **command) -> None:
        """One command, e.g. `send(cancel=pb.Cancel())`; the key is filled in."""
        for message in command.values():
            message.key.CopyFrom(key_to_proto(self.key))
        self.link.send(pb.Command(**command))

    def post(self, event) -> None:
        if isinstance(event, (Lost, pb.Ended, pb.Refused)):
            self._open = False  # nothing is left there to cancel
        self._mailbox.post(self, event)

    def post_tokens(self, tokens: Tokens) -> None:
        self.num_unread += len(tokens.token_ids)
        self.post(tokens)
        if self.num_unread > self.link.max_unread_tokens and self._open:
            self.close()
            self._mailbox.post(self, Overflow())

    def cancel(self) -> None:
        """Ended is still to come."""
        self.send(cancel=pb.Cancel())

    def close(self) -> None:
        """Idempotent. Late events of the key are dropped from now on."""
        if self.link.legs.get(self.key) is self:
            del self.link.legs[self.key]
        if self._open:
            self._open = False
            self.send(cancel=pb.Cancel())


class WorkerLink:
    """Belongs to the event loop. `run()` is its life; `on_change(link)` is called when what others see has changed."""

    def __init__(
        self,
        address: str,
        instance: bytes,
        *,
        check_hello: Callable[[pb.Hello], str | None],
        on_change: Callable[["WorkerLink"], None],
        on_block_events: Callable[["WorkerLink", pb.BlockEvents], None],
        max_unread_tokens: int,
    ):
        """`check_hello` says why this worker cannot be used, or None."""
        self.address = address
        self.hello: pb.Hello | None = None
        self.load = pb.Load()
        self.state = LinkState.CONNECTING
        self.reason = "not connected yet"
        self.legs: dict[Key, Leg] = {}
        self.max_unread_tokens = max_unread_tokens
        self.prefill_tokens_per_s = 0.0  # 0: not measured yet
        self._instance = instance
        self._check_hello = check_hello
        self._on_change = on_change
        self._on_block_events = on_block_events
        self._outbox: asyncio.Queue[pb.Command | None] | None = None

    @property
    def serving(self) -> bool:
        return self.state is LinkState.SERVING

    @property
    def worker_id(self) -> bytes:
        """Instance and epoch: a restarted worker is another one."""
        return self.hello.instance + self.hello.epoch.to_bytes(8, "little") if self.hello else b""

    @property
    def name(self) -> str:
        return self.hello.instance.hex()[:8] if self.hello else self.address

    def open(self, key: Key, mailbox: Mailbox) -> Leg:
        leg = self.legs[key] = Leg(self, key, mailbox)
        return leg

    def send(self, command: pb.Command) -> None:
        """Queued for the session; dropped without one, since its keys have heard Lost."""
        if self._outbox is not None:
            self._outbox.put_nowait(command)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """So long it took to compute so many tokens of a prompt."""
        if num_tokens >= _RATED_TOKENS and seconds > 0:
            rate, known = num_tokens / seconds, self.prefill_tokens_per_s
            self.prefill_tokens_per_s = (3 * known + rate) / 4 if known else rate

    def subscribe(self) -> None:
        """Ask for index events: a snapshot comes first."""
        self.send(pb.Command(subscribe=pb.Subscribe()))

    async def run(self) -> None:
        """Connect, serve the session, and again after a pause; until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            connected_at = now()
            async with open_channel(self.address) as channel:
                reason = await self._session(channel)
            was_up = self.hello is not None
            self._lose(reason)
            if was_up and now() - connected_at > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _session(self, channel: grpc.aio.Channel) -> str:
        """One stream, to its end; returns why it ended."""
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        outbox = asyncio.Queue()
        hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, instance=self._instance)
        outbox.put_nowait(pb.Command(hello=hello))
        writer = asyncio.create_task(_write(call, outbox), name=f"session writer {self.address}")
        try:
            return await self._read(call, outbox)
        except TimeoutError:
            return "no word from it"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except (IndexError, ValueError) as error:
            log.exception("malformed event %s", fields(address=self.address))
            return f"it sent what cannot be read: {error}"
        finally:
            self._outbox = None
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, call, outbox: asyncio.Queue) -> str:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("kind") != "hello":
            return "it did not say Hello"
        if reason := self._refusal(first.hello):
            return reason
        self.hello, self._outbox = first.hello, outbox
        self.load = pb.Load(state="")
        self._become(LinkState.SERVING, "")
        log.info("worker joined %s", fields(worker=self.name, address=self.address, roles=",".join(first.hello.roles)))
        while True:
            async with asyncio.timeout(_SILENCE_S):
                event = await call.read()
            if event is grpc.aio.EOF:
                return "it closed the session"
            self._dispatch(event)

    def _refusal(self, hello: pb.Hello) -> str | None:
        if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
            reason = f"speaks protocol {hello.protocol_min} to {hello.protocol_max}, this gateway {PROTOCOL}"
        else:
            reason = self._check_hello(hello)
        if reason and self.state is not LinkState.REFUSED:
            log.warning("worker refused %s", fields(address=self.address, reason=reason))
        if reason:
            self._become(LinkState.REFUSED, reason)
        return reason

    def _lose(self, reason: str) -> None:
        if self.hello is not None:
            log.warning("worker lost %s", fields(worker=self.name, address=self.address, reason=reason))
        legs, self.legs = list(self.legs.values()), {}
        for leg in legs:
            leg.post(Lost(reason))
        if self.state is not LinkState.REFUSED:
            self._become(LinkState.CONNECTING, reason)
        self.hello = None

    def _become(self, state: LinkState, reason: str) -> None:
        self.state, self.reason = state, reason
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
        elif kind not in (None, "hello"):
            message = getattr(event, kind)
            if leg := self.legs.get(key_from_proto(message.key)):
                if kind in ("ended", "refused"):
                    del self.legs[leg.key]
                leg.post(message)
            if kind in ("done", "ended"):
                self._on_change(self)  # room there, perhaps, for somebody who waits

    def _set_load(self, load: pb.Load) -> None:
        self.load = load
        state = {"draining": LinkState.DRAINING, "stalled": LinkState.STALLED}.get(load.state, LinkState.SERVING)
        self._become(state, "" if state is LinkState.SERVING else load.state)

    def _dispatch_tokens(self, output: pb.StepOutput) -> None:
        legs = [self.legs.get(key_from_proto(key)) for key in output.keys]
        token_at = logprob_at = 0
        for row, index in enumerate(output.key_index):
            num_ids = output.num_ids[row]
            num_logprobs = num_ids if output.has_logprobs[row] else 0
            if leg := legs[index]:
                leg.post_tokens(
                    Tokens(
                        output.choice[row],
                        output.first_index[row],
                        tuple(output.token_ids[token_at : token_at + num_ids]),
                        tuple(output.logprobs[logprob_at : logprob_at + num_logprobs]),
                        output.finish_reason[row],
                    )
                )
            token_at += num_ids
            logprob_at += num_logprobs


async def _write(call, outbox: asyncio.Queue) -> None:
    """The stream's only writer; a failed write shows in the reader."""
    try:
        while True:
            await call.write(await outbox.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
