"""FakeWorker: a real gRPC server that speaks worker.proto and computes nothing. Its tokens are a pure function of
(prompt, choice, output index), so that any worker continues what another began.

Gates hold it at a step (`worker.hold("prefill")`), scripts make it refuse or fail; `worker.held` is the commands not
given back.
"""

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from baton.protocol import GRANTS_POOLING, KV_TRANSFER_FAILED, POOLING, PREFILL_ON_ADMIT, PROMPT_LOGPROBS
from baton.service.codec import key_from_proto, key_to_proto
from baton.service.net import server as grpc_server
from baton.v1 import inference_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from tests.support.gateway.misbehavior import Misbehavior

IDENTITY = hashlib.sha256(b"fake model").digest()
GATES = ("hello", "admit", "accept", "prefill", "fetch", "decode", "end", "offer", "attach")
_leases: dict[bytes, "_Lease"] = {}
_lease_ids = itertools.count(1)


def token_at(prompt_ids: Sequence[int], choice: int, index: int, vocab_size: int) -> int:
    """Return a token, never one of the first ten ids: those are control tokens."""
    text = f"{list(prompt_ids)}/{choice}/{index}".encode()
    return 10 + int.from_bytes(hashlib.sha256(text).digest()[:4], "little") % (vocab_size - 10)


def tokens_of(prompt_ids: Sequence[int], num_tokens: int, vocab_size: int, choice: int = 0) -> list[int]:
    return [token_at(prompt_ids, choice, index, vocab_size) for index in range(num_tokens)]


def vector_of(spec: pb.RequestSpec) -> list[float]:
    """Return what a FakeWorker makes of a prompt that it need not answer."""
    ids = spec.token_ids
    if spec.pooling.label_token_ids:
        return [-len(ids) / 1000, *[-1.0 for _ in spec.pooling.label_token_ids[1:]]]
    values = [float(len(ids)), float(ids[0]), float(ids[-1]), float(spec.pooling.pooling)]
    return values[: spec.pooling.dimensions or None]


@dataclass
class _Lease:
    """A prefill that waits to be taken; shared by all FakeWorkers of this process instead of KV."""

    source: "FakeWorker"
    done: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False


class _Session:
    def __init__(self, context, stream: asyncio.Task):
        self.context, self.stream = context, stream
        self.outbox: asyncio.Queue = asyncio.Queue()
        self.tasks: dict[tuple, asyncio.Task] = {}
        self.decoding: set[tuple] = set()
        self.says_all_twice = False
        self.instance = b""  # as the gateway names it
        self.seq = None

    def send(self, **event) -> None:
        self.send_event(pb.Event(**event))

    def send_event(self, event: pb.Event) -> None:
        self.outbox.put_nowait(event)
        if self.says_all_twice and not event.HasField("hello"):
            self.outbox.put_nowait(event)


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    says_granted = True  # of a prompt that it need not answer
    read_s = 0.002  # what such a one takes

    def __init__(self, role: str, tokenizer_digest: bytes, vocab_size: int, *, context: int = 1024, **hello):
        self.role, self.vocab_size = role, vocab_size
        self.instance, self.epoch = secrets.token_bytes(16), secrets.randbits(64)
        self.hello = pb.Hello(
            protocol_min=1,
            protocol_max=1,
            instance=self.instance,
            epoch=self.epoch,
            roles=[role],
            model_identity=IDENTITY,
            tokenizer_digest=tokenizer_digest,
            numerics_class="fake/none/fp32/fp32/tp1/exact",
            kv_gives=["fake fp32"],
            kv_takes=["fake fp32"],
            host_id="here",
            features=[POOLING, PROMPT_LOGPROBS, PREFILL_ON_ADMIT, *([GRANTS_POOLING] if self.says_granted else [])],
        )
        self.hello.limits.max_model_len = self.hello.model.context = context
        self.hello.limits.max_num_seqs = 8
        self.hello.model.name, self.hello.model.family, self.hello.model.vocab_size = "fake", "llama", vocab_size
        self.hello.model.transports.append("tcp")
        self.hello.model.hidden_size = 4
        self.hello.MergeFrom(pb.Hello(**hello))
        self.refusals: list[str] = []  # reasons for the next Admits or Prefills
        self.refused_adapters: dict[bytes, str] = {}  # a reason for all that need an adapter, by its identity
        self.failures: dict[str, list[tuple[int, str]]] = {}  # step -> (code, reason) of the next keys that end there
        self.held: set[tuple] = set()
        self.parked: dict[str, pb.RequestSpec] = {}  # by request id: sequences whose session was lost
        self.num_parked_tokens = 0  # of each of their choices, at least; they are sent together
        self.commands: list[tuple[str, object]] = []
        self.spans: dict[bytes, None] = {}
        self._specs: dict[tuple, pb.RequestSpec] = {}
        self.is_silent = False
        self.is_cut_off = False  # from takers: no KV of it comes to any
        self.pull_failure = KV_TRANSFER_FAILED  # as a taker tells it then
        self.misbehavior = Misbehavior()
        self.ends_at: int | None = None  # tokens, the prompt's too, at which it ends a choice as if that were an end
        self.holds_at: int | None = None  # output tokens of a choice with which it closes its gate "decode"
        # Tokens of every answer, which token 0 ends, or what says them of a prompt.
        self.script: Sequence[int] | Callable[[Sequence[int]], Sequence[int]] = ()
        self.state = "serving"  # as its loads say
        self.port = 0
        self._gates = {name: asyncio.Event() for name in GATES}
        for gate in self._gates.values():
            gate.set()
        self._sessions: set[_Session] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.commands if kind not in ("hello", "subscribe")]

    def hold(self, gate: str) -> None:
        self._gates[gate].clear()

    def release(self, gate: str) -> None:
        self._gates[gate].set()

    def hang_up(self) -> None:
        """Break every session; what they served is served on."""
        for session in list(self._sessions):
            session.tasks["abort",] = asyncio.create_task(session.context.abort(grpc.StatusCode.UNAVAILABLE, "reset"))

    async def start(self, port: int = 0) -> "FakeWorker":
        self._server = grpc_server.make_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = grpc_server.bind(self._server, f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Stop as if it were killed: every stream breaks at once."""
        for lease in _leases.values():
            if lease.source is self:
                lease.lost = True
                lease.done.set()
        await self._server.stop(None)

    # ---- the session ----

    async def Session(self, commands, context):
        session = _Session(context, asyncio.current_task())
        self._sessions.add(session)
        writer = asyncio.create_task(self._write(session))
        try:
            async for command in commands:
                self._obey(session, command)
        finally:
            self._sessions.discard(session)
            for key in session.decoding & self.held:
                self.held.discard(key)
                self.parked[key[0]] = self._specs[key]
            for task in (*session.tasks.values(), writer):
                task.cancel()

    async def _write(self, session: _Session) -> None:
        while True:
            await session.context.write(await session.outbox.get())

    async def _greet(self, session: _Session) -> None:
        await self._gates["hello"].wait()
        session.send(hello=self.hello)
        await self._send_loads(session)

    async def _send_loads(self, session: _Session) -> None:
        while True:
            session.send(load=self.misbehavior.load(pb.Load(state=self.state, num_running=len(self.held))))
            await asyncio.sleep(0.25)

    def _obey(self, session: _Session, command: pb.Command) -> None:
        kind = command.WhichOneof("kind")
        message = getattr(command, kind)
        self.commands.append((kind, message))
        if kind == "hello":
            for older in [each for each in self._sessions if each.instance == message.instance]:
                older.stream.cancel()
            session.instance = message.instance
            session.says_all_twice = self.misbehavior.says_all_twice
            session.tasks["load",] = asyncio.create_task(self._greet(session))
        elif kind == "subscribe":
            session.seq = 0
            self._send_spans(session, list(self.spans), snapshot=True)
        elif self.misbehavior.replaces_answer_to(kind):
            for event in self.misbehavior.events(kind, message, lambda spec: self._draw(spec, 0, 0)[0]):
                session.send_event(event)
        elif not self.is_silent:
            getattr(self, f"_{kind}", lambda *_: None)(session, key_from_proto(message.key), message)

    def _send_spans(self, session: _Session, sealed: list[bytes], snapshot: bool = False) -> None:
        events = pb.BlockEvents(epoch=self.epoch, seq=session.seq, snapshot=snapshot, sealed=sealed)
        session.seq += 1
        session.send(block_events=events)

    def seal(self, spans: Sequence[bytes]) -> None:
        new = [span for span in spans if span not in self.spans]
        self.spans.update(dict.fromkeys(new))
        for session in self._sessions:
            if new and session.seq is not None:
                self._send_spans(session, new)

    def num_cached_tokens(self, spec: pb.RequestSpec) -> int:
        spans = list(spec.span_hashes)[: (len(spec.token_ids) - 1) // 64]
        return 64 * len(list(itertools.takewhile(self.spans.__contains__, spans)))

    # ---- commands ----

    def _admit(self, session, key, message) -> None:
        self._spawn(session, key, self._grant(session, key, message))

    def _prefill(self, session, key, message) -> None:
        if message.spec.HasField("pooling"):
            self._spawn(session, key, self._pool(session, key, message))
        elif message.HasField("taker"):
            self._spawn(session, key, self._prefill_for_taker(session, key, message))
        else:
            self._spawn(session, key, self._prefill_here(session, key))

    def _offer(self, session, key, message) -> None:
        self._spawn(session, key, self._give(session, key, message))

    def _fetch(self, session, key, message) -> None:
        self._spawn(session, key, self._take(session, key, message))

    def _start(self, session, key, message) -> None:
        if key in self.held:
            taking = session.tasks[key]
            self._spawn(session, key, self._decode(session, key, [f.choice for f in message.first_tokens], taking))

    def _attach(self, session, key, message) -> None:
        self._spawn(session, key, self._go_on(session, key, message))

    def _cancel(self, session, key, message) -> None:
        if key in self.held:
            self._end(session, key, 1, "CANCELLED")
        elif task := session.tasks.pop(key, None):
            task.cancel()

    # ---- what they do ----

    def _spawn(self, session, key, work) -> None:
        async def run() -> None:
            try:
                await work
            except _Failed as failed:
                self._end(session, key, *failed.args)

        session.tasks[key] = asyncio.create_task(run())

    async def _pass(self, gate: str) -> None:
        if self.failures.get(gate):
            raise _Failed(*self.failures[gate].pop(0))
        await self._gates[gate].wait()

    def _refuses(self, session, message, num_tokens: int) -> bool:
        """Refuse by its script, or because the tokens are more than it holds."""
        if self.refusals:
            reason = self.refusals.pop(0)
        elif message.spec.adapter in self.refused_adapters:
            reason = self.refused_adapters[message.spec.adapter]
        elif num_tokens > self.hello.limits.max_model_len:
            reason = "too_long"
        else:
            return False
        session.send(refused=pb.Refused(key=message.key, reason=reason, retry_after_ms=20))
        return True

    async def _grant(self, session, key, message) -> None:
        await self._pass("admit")
        spec = message.spec
        if self._refuses(session, message, spec.num_prompt_tokens + spec.max_tokens):
            return
        self.held.add(key)
        self._specs[key] = message.spec
        cached = self.num_cached_tokens(message.spec)
        session.send(granted=pb.Granted(key=message.key, num_cached_tokens=cached))
        if message.prefill:
            await self._prefill_here(session, key)

    async def _prefill_for_taker(self, session, key, message) -> None:
        await self._pass("accept")
        if self._refuses(session, message, len(message.spec.token_ids) + 1):
            return
        self.held.add(key)
        lease_id = next(_lease_ids).to_bytes(8, "little")
        lease = _leases[lease_id] = _Lease(self)
        cached = self.num_cached_tokens(message.spec)
        pulled = None
        for source in message.sources:
            _leases[source.handle].taken.set()
            if (holder := _leases[source.handle].source).is_cut_off:
                pulled = pb.Pulled(failure="cut off", reason=holder.pull_failure)
            else:
                num_before, cached = cached, max(cached, int.from_bytes(source.ticket, "little"))
                pulled = pb.Pulled(num_tokens=cached - num_before)
        accepted = pb.Accepted(
            key=message.key, lease_id=lease_id, handle=lease_id, ticket=b"t" + lease_id, num_cached_tokens=cached
        )
        session.send(accepted=accepted)
        await self._pass("prefill")
        self._send_done(session, message.key, message.spec, cached, pulled)
        lease.done.set()
        await lease.taken.wait()
        self._end(session, key)

    async def _pool(self, session, key, message) -> None:
        await self._pass("accept")
        if self._refuses(session, message, len(message.spec.token_ids)):
            return
        self.held.add(key)
        if self.says_granted:
            session.send(granted=pb.Granted(key=message.key))
        await self._pass("prefill")
        await asyncio.sleep(self.read_s)
        done = pb.Done(key=message.key, queue_s=0.001, prefill_s=self.read_s, pooled=vector_of(message.spec))
        session.send(done=done)
        self._end(session, key)

    async def _give(self, session, key, message) -> None:
        """Lease spans that are here, until they are taken; the ticket tells how many tokens."""
        await self._pass("offer")
        hashes = message.spans.hashes
        self.held.add(key)
        if not all(span in self.spans for span in hashes):
            session.send(not_here=pb.NotHere(key=message.key))
            self._end(session, key)
            return
        lease_id = next(_lease_ids).to_bytes(8, "little")
        lease = _leases[lease_id] = _Lease(self)
        lease.done.set()
        ticket = (64 * len(hashes)).to_bytes(4, "little")
        session.send(offered=pb.Offered(key=message.key, lease_id=lease_id, handle=lease_id, ticket=ticket))
        await lease.taken.wait()
        self._end(session, key)

    async def _prefill_here(self, session, key) -> None:
        await self._pass("prefill")
        spec = self._specs[key]
        going_on = self._send_done(session, key_to_proto(key), spec, self.num_cached_tokens(spec))
        await self._decode(session, key, going_on, None)

    def _send_done(self, session, key, spec, cached: int, pulled: pb.Pulled | None = None) -> list[int]:
        first = [self._first_token(spec, choice) for choice in range(spec.sampling.n)]
        self.seal(spec.span_hashes)
        done = pb.Done(
            key=key, first_tokens=first, queue_s=0.001, prefill_s=0.002, num_cached_tokens=cached, pulled=pulled
        )
        if spec.sampling.HasField("prompt_logprobs"):
            done.prompt_logprobs.extend(map(_logprobs, spec.token_ids[1 : spec.num_prompt_tokens]))
        session.send(done=done)
        return [token.choice for token in first if not token.finished]

    def _first_token(self, spec, choice: int) -> pb.FirstToken:
        index = len(spec.token_ids) - spec.num_prompt_tokens
        token_id, reason = self._draw(spec, choice, index)
        first = pb.FirstToken(choice=choice, token_id=token_id, finished=bool(reason), finish_reason=reason)
        if spec.sampling.HasField("logprobs"):
            first.logprobs.CopyFrom(_logprobs(token_id))
        return first

    def _draw(self, spec, choice: int, index: int) -> tuple[int, int]:
        prompt = spec.token_ids[: spec.num_prompt_tokens]
        token_id = token_at(prompt, choice, index, self.vocab_size)
        if script := self.script(prompt) if callable(self.script) else self.script:
            token_id = script[index] if index < len(script) else 0
        if token_id in spec.stop_token_ids and index + 1 > spec.min_tokens:
            return token_id, inference_pb2.FINISH_REASON_STOP
        is_full = index + 1 >= spec.max_tokens
        if self.ends_at is not None:
            is_full |= spec.num_prompt_tokens + index + 1 >= self.ends_at
        return token_id, inference_pb2.FINISH_REASON_LENGTH if is_full else 0

    async def _take(self, session, key, message) -> None:
        await self._pass("fetch")
        lease = _leases.get(message.handle)
        if lease is not None:
            await lease.done.wait()
        if lease is None or lease.lost or lease.source.is_cut_off:
            raise _Failed(14, "KV_TRANSFER_FAILED")
        lease.taken.set()
        self.seal(self._specs[key].span_hashes)
        session.send(fetched=pb.Fetched(key=message.key, transport="tcp", transfer_s=0.004, after_last_ready_s=0.001))

    async def _go_on(self, session, key, message) -> None:
        """All choices have come as far as the first that is asked for."""
        await self._pass("attach")
        spec = self.parked.get(key[0])
        if spec is None or spec.fingerprint != message.fingerprint:
            session.send(not_here=pb.NotHere(key=message.key))
            return
        self.held.add(key)
        self._specs[key] = self.parked.pop(key[0])
        num_tokens = [self.num_parked_tokens] * spec.sampling.n
        session.send(granted=pb.Granted(key=message.key, num_tokens=num_tokens))
        choices, first = list(range(spec.sampling.n)), min(message.next_index)
        if first < self.num_parked_tokens:
            output = pb.StepOutput(keys=[key_to_proto(key)])
            for choice in choices:
                drawn = [self._draw(spec, choice, index)[0] for index in range(first, self.num_parked_tokens)]
                _add_row(output, choice, first, drawn, 0, spec.sampling.HasField("logprobs"))
            session.send(step_output=output)
        await self._decode(session, key, choices, None, max(first, self.num_parked_tokens))

    async def _decode(self, session, key, choices: list[int], taking, index: int | None = None) -> None:
        if taking is not None:
            await taking
            if key not in self.held:
                return
        session.decoding.add(key)
        spec = self._specs[key]
        if index is None:
            index = len(spec.token_ids) - spec.num_prompt_tokens + 1
        while choices:
            await self._pass("decode")
            await asyncio.sleep(0.001)
            output = pb.StepOutput(keys=[key_to_proto(key)])
            for choice in list(choices):
                token_id, reason = self._draw(spec, choice, index)
                _add_row(output, choice, index, [token_id], reason, spec.sampling.HasField("logprobs"))
                if reason:
                    choices.remove(choice)
            session.send(step_output=output)
            index += 1
            if index == self.holds_at:
                self.hold("decode")
        await self._pass("end")
        self._end(session, key)

    def _end(self, session, key, code: int = 0, reason: str = "") -> None:
        if key in self.held:
            self.held.discard(key)
            report = pb.DecodeReport(kv_wait_s=0.0001, decode_queue_s=0.0001, first_step_s=0.0002, num_steps=1)
            report.proposed_by_position.extend([3, 2])
            report.accepted_by_position.extend([2, 1])
            ended = pb.Ended(key=key_to_proto(key), code=code, reason=reason, message=reason.lower(), decode=report)
            session.send(ended=ended)
        task = session.tasks.pop(key, None)
        if task and task is not asyncio.current_task():
            task.cancel()


class _Failed(Exception):
    """(code, reason) that the key ends with."""


def _add_row(
    output: pb.StepOutput, choice: int, index: int, token_ids: Sequence[int], reason: int, has_logprobs: bool
) -> None:
    output.key_index.append(0)
    output.choice.append(choice)
    output.first_index.append(index)
    output.num_ids.append(len(token_ids))
    output.token_ids.extend(token_ids)
    output.has_logprobs.append(has_logprobs)
    output.finish_reason.append(reason)
    if has_logprobs:
        output.logprobs.extend(map(_logprobs, token_ids))


def _logprobs(token_id: int) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(chosen=inference_pb2.TokenLogprob(token_id=token_id, logprob=-1.0))
