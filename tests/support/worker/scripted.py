"""A gateway that the test plays: sessions with real workers, and the whole walk of one request, step by step."""

import asyncio
import hashlib
import secrets
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.service.settings import make_settings
from baton.v1 import kv_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker.app import Worker, bind_server, load_engine
from baton.worker.hello import tokenizer_digest
from baton.worker.kv.pool_memory import PoolMemory
from baton.worker.observe.admin_port import open_admin
from baton.worker.settings import WorkerSettings
from kvtransfer.naming import chain_hashes
from tests.support.observe.loads import blocks_of, is_idle
from tests.support.pace import patience
from tests.support.waiting import until_async
from tests.support.worker.fakes import TABLE

_CHAIN_ROOT = hashlib.sha256(b"tests/worker").digest()
BUDGET_MS = 30_000


def run_bounded(main, timeout_s: float = 90):
    """Return the result of `main()`; a test that hangs fails instead."""
    return asyncio.run(asyncio.wait_for(main(), patience(timeout_s)))


class LegEnded(Exception):
    """The worker ended or refused the leg; `event` says how."""

    def __init__(self, event):
        super().__init__(str(event))
        self.event = event


def make_spec(token_ids, *, max_tokens=8, budget_ms=BUDGET_MS, traceparent="", **sampling) -> pb.RequestSpec:
    hashes = chain_hashes(_CHAIN_ROOT, list(token_ids))
    spec = pb.RequestSpec(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        span_hashes=hashes,
        chain_parent=hashes[-1] if hashes else _CHAIN_ROOT,
        max_tokens=max_tokens,
        budget_ms=budget_ms,
        traceparent=traceparent,
    )
    spec.sampling.MergeFrom(pb.WorkerSampling(**{"top_p": 1.0, "repetition_penalty": 1.0, "n": 1, **sampling}))
    return spec


class Session:
    """One session with one worker; events are sorted by key, and every key's ends are counted."""

    def __init__(self, target: str, instance: bytes | None = None):
        """`instance`: of the gateway that it represents; one of its own where none is given."""
        self._instance = instance or secrets.token_bytes(16)
        self._channel = grpc.aio.insecure_channel(target)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.call = self.stub.Session()
        self.hello: pb.Hello | None = None
        self.loads: list[pb.Load] = []
        self.block_events: asyncio.Queue[pb.BlockEvents] = asyncio.Queue()
        self.num_ended: dict[str, int] = defaultdict(int)
        self.ended: dict[str, pb.Ended] = {}
        self._queues: dict[str, asyncio.Queue] = defaultdict(asyncio.Queue)
        self._reader: asyncio.Task | None = None
        self._writing = asyncio.Lock()

    async def open(self) -> "Session":
        await self.send(hello=pb.Hello(protocol_min=1, protocol_max=1, instance=self._instance))
        self.hello = (await self.call.read()).hello
        self._reader = asyncio.create_task(self._read())
        return self

    async def close(self) -> None:
        """Hangs up."""
        self.call.cancel()
        if self._reader:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def send(self, **command) -> None:
        async with self._writing:  # grpc.aio takes one write at a time
            await self.call.write(pb.Command(**command))

    async def next(self, request_id: str, *kinds: str, timeout_s: float = 30):
        """The next event of a key, one of `kinds`; anything else that ends it raises LegEnded."""
        kind, event = await asyncio.wait_for(self._queues[request_id].get(), patience(timeout_s))
        if kind in kinds:
            return event
        if kind in ("ended", "refused"):
            raise LegEnded(event)
        raise AssertionError(f"{kind} instead of {kinds}: {event}")

    async def wait_ended(self, request_id: str, timeout_s: float = 30) -> pb.Ended:
        await until_async(lambda: request_id in self.ended, f"{request_id} has ended", timeout_s)
        return self.ended[request_id]

    async def next_load(self, after_s: float = 0.0) -> pb.Load:
        await asyncio.sleep(after_s)
        known = len(self.loads)
        await until_async(lambda: len(self.loads) > known, "the worker reports its load")
        return self.loads[-1]

    async def blocks(self) -> dict[str, int]:
        return blocks_of(await self.next_load())

    async def wait_idle(self, timeout_s: float = 15) -> dict[str, int]:
        """Wait until the worker is idle; returns the blocks by holder."""
        async with asyncio.timeout(patience(timeout_s)):
            while True:
                load = await self.next_load()
                if is_idle(load):
                    return blocks_of(load)

    async def _read(self) -> None:
        while (event := await self.call.read()) is not grpc.aio.EOF:
            kind = event.WhichOneof("kind")
            message = getattr(event, kind)
            if kind == "load":
                self.loads.append(message)
            elif kind == "block_events":
                self.block_events.put_nowait(message)
            elif kind == "step_output":
                for request_id, row in rows_of(message):
                    self._queues[request_id].put_nowait(("row", row))
            else:
                request_id = message.key.request_id
                if kind == "ended":
                    self.num_ended[request_id] += 1
                    self.ended[request_id] = message
                self._queues[request_id].put_nowait((kind, message))


@dataclass
class TokenRow:
    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: list
    finish_reason: int


def rows_of(message: pb.StepOutput):
    """Return (request_id, TokenRow) of each row."""
    token_at = logprobs_at = 0
    for row in range(len(message.key_index)):
        count = message.num_ids[row]
        logprobs = []
        if message.has_logprobs[row]:
            logprobs = list(message.logprobs[logprobs_at : logprobs_at + count])
            logprobs_at += count
        token_ids = list(message.token_ids[token_at : token_at + count])
        token_at += count
        key = message.keys[message.key_index[row]]
        yield (
            key.request_id,
            TokenRow(message.choice[row], message.first_index[row], token_ids, logprobs, message.finish_reason[row]),
        )
    assert token_at == len(message.token_ids) and logprobs_at == len(message.logprobs)


@dataclass
class Answer:
    """All tokens by choice, and what the workers said beside them."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    granted: pb.Granted | None = None
    accepted: pb.Accepted | None = None
    done: pb.Done | None = None
    fetched: pb.Fetched | None = None
    ended: pb.Ended | None = None

    def add_first(self, done: pb.Done) -> list[pb.FirstToken]:
        """Return the first tokens of the choices that continue."""
        self.done = done
        for first in done.first_tokens:
            self.token_ids[first.choice] = [first.token_id]
            self.logprobs[first.choice] = [first.logprobs] if first.HasField("logprobs") else []
            if first.finished:
                self.finish_reasons[first.choice] = first.finish_reason
        return [first for first in done.first_tokens if not first.finished]

    def add_row(self, row: TokenRow) -> None:
        assert row.first_index == len(self.token_ids[row.choice]), "a token lost or repeated"
        assert row.choice not in self.finish_reasons
        self.token_ids[row.choice] += row.token_ids
        self.logprobs[row.choice] += row.logprobs
        if row.finish_reason:
            self.finish_reasons[row.choice] = row.finish_reason


def taker_of(hello: pb.Hello) -> kv_pb2.Taker:
    """Return the taker that a gateway announces to a prefill worker for the worker that sent `hello`."""
    return kv_pb2.Taker(
        instance=hello.instance, epoch=hello.epoch, layout=hello.layout, numerics_class=hello.numerics_class
    )  # fmt: skip


class Pair:
    """A prefill and a decode worker, and how a request walks through them."""

    def __init__(self, prefill: Session, decode: Session):
        self.prefill, self.decode = prefill, decode

    def taker(self) -> kv_pb2.Taker:
        return taker_of(self.decode.hello)

    async def generate(self, request_id: str, spec: pb.RequestSpec, reached=None) -> Answer:
        """`reached(phase)` is called when the walk reaches admitted, accepted, fetching, done, started, row."""
        reached = reached or (lambda phase: None)
        key, answer = pb.Key(request_id=request_id), Answer()
        await self.decode.send(admit=pb.Admit(key=key, spec=spec))
        answer.granted = await self.decode.next(request_id, "granted")
        reached("admitted")
        taker = self.taker()
        await self.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=taker))
        answer.accepted = accepted = await self.prefill.next(request_id, "accepted")
        reached("accepted")
        await self.decode.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
        reached("fetching")
        first_tokens = answer.add_first(await self.prefill.next(request_id, "done"))
        reached("done")
        if not first_tokens:  # the taker first: from a source that was cancelled it would hear of a lease that is over
            await self.decode.send(cancel=pb.Cancel(key=key))
            await self.decode.wait_ended(request_id)
            await self.prefill.send(cancel=pb.Cancel(key=key))
            return answer
        await self.decode.send(start=pb.Start(key=key, first_tokens=first_tokens))
        reached("started")
        answer.fetched = await self.decode.next(request_id, "fetched")
        await self.gather(self.decode, request_id, answer, lambda: reached("row"))
        return answer

    async def generate_here(self, request_id: str, spec: pb.RequestSpec) -> Answer:
        """The decode worker alone."""
        key, answer = pb.Key(request_id=request_id), Answer()
        await self.decode.send(admit=pb.Admit(key=key, spec=spec))
        answer.granted = await self.decode.next(request_id, "granted")
        await self.decode.send(prefill=pb.Prefill(key=key))
        answer.add_first(await self.decode.next(request_id, "done"))
        await self.gather(self.decode, request_id, answer)
        return answer

    async def gather(self, session: Session, request_id: str, answer: Answer, on_row=lambda: None) -> None:
        while True:
            event = await session.next(request_id, "row", "ended")
            if isinstance(event, pb.Ended):
                if event.code:
                    raise LegEnded(event)
                answer.ended = event
                return
            answer.add_row(event)
            on_row()

    async def cancel(self, request_id: str) -> None:
        key = pb.Key(request_id=request_id)
        await self.prefill.send(cancel=pb.Cancel(key=key))
        await self.decode.send(cancel=pb.Cancel(key=key))


@asynccontextmanager
async def run_worker(model: Path, role: str, **options):
    """Run a worker in this process: real engine, real server."""
    settings = make_settings(WorkerSettings, {"model": model, "num_blocks": 160, "threads": 1, **options})
    bound, memory = bind_server(settings), PoolMemory(settings.kv_mirror_gib)
    engine = load_engine(settings.engine, memory)
    async with (
        open_admin(settings.admin, settings.admin_hosts, engine.model_name, settings.tls) as admin,
        Worker(settings, role, TABLE, engine, memory, tokenizer_digest(model), bound, admin) as worker,
    ):
        yield worker


@asynccontextmanager
async def run_pair(model: Path, prefill=None, decode=None, **options):
    """Run two workers; yields (Pair, prefill Worker, decode Worker); at the end both ledgers must be whole and
    nothing left in use."""
    async with (
        run_worker(model, "prefill", **options, **(prefill or {})) as p,
        run_worker(model, "decode", **options, **(decode or {})) as d,
    ):
        sessions = [await Session(f"127.0.0.1:{worker.port}").open() for worker in (p, d)]
        try:
            yield Pair(*sessions), p, d
            for worker in (p, d):
                worker.engine.check_integrity()
        finally:
            for session in sessions:
                await session.close()


def worker_prompt(num_tokens: int, seed: int = 1) -> list[int]:
    """Return token ids of the model of tests/support/models.py; other seeds have no span in common."""
    return [5 + (seed * 7919 + i * i * 31 + i * 17) % 1000 for i in range(num_tokens)]
