"""Record what clients saw, event by event: the checker reads nothing else."""

import asyncio
import hashlib
import itertools
import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.client import Prompt, make_request, read_error
from tests.support.pace import patience


@dataclass(eq=False)
class Ask:
    """One request as its client saw it."""

    request_id: str
    prompt: Prompt
    max_tokens: int
    sampling: dict
    tenant: str = "default"
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    finished: dict[int, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)  # of messages with tokens
    ended: float | None = None
    status: str = ""
    reason: str = ""
    details: str = ""
    retry_after_s: float | None = None
    seed: int | None = None
    usage: pb.Usage | None = None
    faults: list[str] = field(default_factory=list)  # of the stream's shape
    was_cancelled: bool = False  # by this client
    call: grpc.aio.UnaryStreamCall | None = None
    task: asyncio.Task | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def gap_s(self) -> float:
        """Return the longest wait between two messages."""
        return max((later - sooner for sooner, later in itertools.pairwise(self.times)), default=0.0)

    def cancel(self) -> None:
        self.was_cancelled = True
        self.call.cancel()

    async def got(self, num_tokens: int, timeout_s: float = 60) -> None:
        """Wait until that many tokens are here. Raises AssertionError when it ends before."""
        async with asyncio.timeout(patience(timeout_s)):
            while self.num_tokens < num_tokens:
                assert self.ended is None, f"{self.request_id} ended with {self.num_tokens} tokens: {self.words()}"
                self._arrived.clear()
                await self._arrived.wait()

    def words(self) -> str:
        return f"{self.status} {self.reason}: {self.details}".strip(": ")

    def take(self, message: pb.GenerateResponse) -> None:
        if self.usage is not None:
            self.faults.append("a message after the last")
        if message.token_ids or message.text:
            if message.index in self.finished:
                self.faults.append(f"tokens of choice {message.index} after its end")
            self.times.append(time.monotonic())
        self.tokens.setdefault(message.index, []).extend(message.token_ids)
        if message.finish_reason:
            if message.index in self.finished:
                self.faults.append(f"choice {message.index} ended twice")
            self.finished[message.index] = pb.FinishReason.Name(message.finish_reason)
        if message.HasField("seed"):
            self.seed = message.seed
        if message.HasField("usage"):
            self.usage = message.usage
        self._arrived.set()

    def end(self, status: str, error: grpc.RpcError | None = None) -> None:
        if self.ended is not None:
            self.faults.append(f"ended twice: {self.status}, {status}")
        self.ended, self.status = time.monotonic(), status
        if error is not None:
            read = read_error(error)
            self.reason, self.details, self.retry_after_s = read.reason, read.message, read.retry_after_s
        self._arrived.set()


class History:
    """All requests of one run. `path`: each event is a line there too."""

    def __init__(self, run: str, path: Path | None = None):
        self.run, self.asks = run, []
        self._file = path.open("a") if path else None
        self._ids = itertools.count()

    def close(self) -> None:
        if self._file:
            self._file.close()

    def ask(
        self, stub: inference_pb2_grpc.InferenceStub, prompt: Prompt, *, max_tokens: int, timeout_s: float = 60,
        request_id: str | None = None, **fields,
    ) -> Ask:  # fmt: skip
        """Send a request now, which is read by a task of its own (`ask.task`). `fields`: of Sampling and Stopping; end
        of sequence is ignored, so that the length is known."""
        name = request_id or f"{self.run}-{next(self._ids)}"
        ask = Ask(name, prompt, max_tokens, {"temperature": 0.0, **fields})
        self.asks.append(ask)
        request = make_request(prompt, request_id=name, max_tokens=max_tokens, ignore_eos=True, **ask.sampling)
        self._record(ask, event="sent", prompt_hash=prompt_hash(prompt))
        ask.call = stub.Generate(request, timeout=timeout_s)
        ask.task = asyncio.create_task(self._read(ask), name=f"client of {name}")
        return ask

    async def _read(self, ask: Ask) -> None:
        try:
            async for message in ask.call:
                first = len(ask.tokens.get(message.index, ()))
                ask.take(message)
                for offset, token in enumerate(message.token_ids):
                    self._record(ask, event="token", choice=message.index, index=first + offset, token=token)
            ask.end("OK")
        except asyncio.CancelledError:
            ask.end("CANCELLED")  # by ask.cancel(), or by what ends the test
            if not ask.was_cancelled:
                raise
        except grpc.aio.AioRpcError as error:
            ask.end(error.code().name, error)
        self._record(ask, event="end", status=ask.status, reason=ask.reason)

    def _record(self, ask: Ask, **event) -> None:
        if self._file:
            line = {
                "run": self.run,
                "t": round(time.monotonic(), 4),
                "request_id": ask.request_id,
                "tenant": ask.tenant,
            }
            self._file.write(json.dumps(line | event) + "\n")


def prompt_hash(prompt: Prompt) -> str:
    data = prompt.encode() if isinstance(prompt, str) else struct.pack(f"<{len(prompt)}I", *prompt)
    return hashlib.sha256(data).hexdigest()[:16]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank, 0 of none; not baton.loadgen.summary's interpolation: comparable with the
    recorded runs."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
