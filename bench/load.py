"""A load generator: requests of given lengths with prompts nobody has seen, sent closed (N at a time) or by arrival."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc

from baton.service.errors import from_rpc_error
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc


@dataclass(frozen=True)
class Job:
    """Greedy, and as long as said: end-of-sequence ids are ignored."""

    prompt_ids: tuple[int, ...]
    num_output: int
    arrival_s: float = 0.0


def draw_jobs(rng: random.Random, lengths: Sequence[tuple[int, int]], vocab_size: int) -> list[Job]:
    """One job for each (prompt, output) length; prompts share nothing, and no special token is in them."""
    return [
        Job(tuple(rng.randrange(5, vocab_size) for _ in range(num_prompt)), num_output)
        for num_prompt, num_output in lengths
    ]


@dataclass
class Progress:
    """A request on its way, as its client sees it."""

    job: Job
    num_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    timing: pb.Timing | None = None
    usage: pb.Usage | None = None


class LoadGenerator:
    """Async client of one gateway; `progress` is what is on its way now."""

    def __init__(self, target: str):
        self._channel = grpc.aio.insecure_channel(target)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.progress: dict[int, Progress] = {}

    async def close(self) -> None:
        await self._channel.close()

    async def one(self, job: Job) -> Progress:
        """Sends it and reads it to the end."""
        progress = Progress(job)
        key = id(progress)
        self.progress[key] = progress
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=job.prompt_ids),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=job.num_output, ignore_eos=True),
        )
        begun = time.perf_counter()
        try:
            async for message in self._answered(request):
                if message.token_ids and not progress.num_tokens:
                    progress.ttft_s = time.perf_counter() - begun
                progress.num_tokens += len(message.token_ids)
                progress.token_ids.extend(message.token_ids)
                if message.HasField("timing"):
                    progress.timing, progress.usage = message.timing, message.usage
            progress.e2e_s = time.perf_counter() - begun
        finally:
            del self.progress[key]
        if progress.num_tokens != job.num_output:
            raise RuntimeError(f"{progress.num_tokens} of {job.num_output} tokens came")
        return progress

    async def _answered(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """Sent again as often as it is told to come back: on a slow machine so many at once wait longer than their class
        was promised."""
        while True:
            try:
                async for message in self._stub.Generate(request, timeout=300):
                    yield message
                return
            except grpc.aio.AioRpcError as call:
                error = from_rpc_error(call)
                if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or error.retry_after_s is None:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def closed(self, jobs: Sequence[Job], concurrency: int) -> list[Progress]:
        """`concurrency` at a time: the next begins when one has ended."""
        waiting = iter(jobs)
        done: list[Progress] = []

        async def work() -> None:
            for job in waiting:
                done.append(await self.one(job))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return done

    async def static(self, jobs: Sequence[Job], batch_size: int) -> list[Progress]:
        """Batches: the next begins when all of the one before have ended."""
        done: list[Progress] = []
        for begin in range(0, len(jobs), batch_size):
            done += await asyncio.gather(*map(self.one, jobs[begin : begin + batch_size]))
        return done

    async def open(self, jobs: Sequence[Job]) -> list[Progress]:
        """Each at its arrival, whatever has become of the others."""
        begun = time.perf_counter()

        async def arrive(job: Job) -> Progress:
            await asyncio.sleep(job.arrival_s - (time.perf_counter() - begun))
            return await self.one(job)

        return await asyncio.gather(*map(arrive, jobs))
