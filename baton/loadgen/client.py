"""Send jobs to a server at their times, or a fixed number concurrently, and record the outcome of each."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from baton.client import NO_RETRIES, AsyncClient, CallError, RetryPolicy
from baton.loadgen.openai import OpenAIBackend
from baton.loadgen.outcome import Latencies, Outcome
from baton.loadgen.plan import Backend, CallFailed, RunPlan, Unreachable
from baton.loadgen.workload import Job, prompt_ids
from baton.service.net.client import explain_failure
from baton.service.observe.phases import PHASES
from baton.service.security.access import Access
from baton.v1 import inference_pb2 as pb

_TIMING_FIELDS = tuple((phase, f"{phase}_s") for phase in (*PHASES, "transfer"))
_PREPARED_TOKENS = 8 << 20  # of prompts: 32 MiB
_UNTIL_SERVED = RetryPolicy(max_attempts=1000)


async def model_info(target: str, access: Access = Access(), model: str = "") -> pb.GetModelInfoResponse:
    """Return the properties of a model, whose name may be omitted if the gateway serves one. Raises Unreachable."""
    async with AsyncClient(target, timeout_s=5, retry=NO_RETRIES, **access.for_client()) as client:
        try:
            return await client.model_info(model)
        except CallError as error:
            raise Unreachable(explain_failure(target, error.code(), error.message, access)) from None


class GrpcBackend:
    """Calls Generate of a gateway over one channel. A request is sent once by default, so that the gateway alone is
    measured."""

    def __init__(self, plan: RunPlan):
        self._plan = plan
        retry = _UNTIL_SERVED if plan.retries else NO_RETRIES
        self._client = AsyncClient(plan.target, timeout_s=plan.timeout_s, retry=retry, **plan.access.for_client())

    async def close(self) -> None:
        await self._client.close()

    def make(self, job: Job) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=self._plan.model,
            token_ids=pb.TokenIds(ids=prompt_ids(job, self._plan.vocab_size, self._plan.seed)),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=job.num_output, ignore_eos=True),
            slo_class=self._plan.slo_class,
        )

    async def stream(self, request: pb.GenerateRequest, outcome: Outcome) -> AsyncIterator[int]:
        message = None
        try:
            async for message in self._client.send(request):
                if self._plan.keeps_tokens:
                    outcome.token_ids.extend(message.token_ids)
                yield len(message.token_ids)
        except CallError as error:
            raise CallFailed(error.code().name, error.message) from None
        finally:
            if message is not None and message.HasField("timing"):
                outcome.num_cached = message.usage.cached_tokens
                timing = message.timing
                outcome.bound_s = dict(timing.bound_s)
                outcome.phases_s = {phase: getattr(timing, field) for phase, field in _TIMING_FIELDS}


class Sender:
    """One channel and its requests: call `prepare`, then `open` or `closed`. Their `begin` is the start of the run
    (monotonic), the same for all senders; now if not given. Needs a running event loop."""

    def __init__(self, plan: RunPlan, on_end: Callable[[Latencies], object] = lambda latencies: None):
        self._plan, self._on_end = plan, on_end
        self._backend: Backend = OpenAIBackend(plan, plan.openai) if plan.openai else GrpcBackend(plan)
        self._prepared: dict[int, Any] = {}

    async def close(self) -> None:
        await self._backend.close()

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Make the first requests before the run: making one takes a tenth of a whole call of eight messages."""
        num_tokens = 0
        for job in jobs:
            num_tokens += job.num_prompt
            if num_tokens > _PREPARED_TOKENS:
                return
            self._prepared[job.index] = self._backend.make(job)

    async def open(
        self, jobs: Sequence[Job], begin: float | None = None, ended: list[Outcome] | None = None
    ) -> list[Outcome]:
        """Send each job at its time, regardless of the others, and wait for all. Return the outcomes in the order in
        which they ended; `ended` is the list that fills meanwhile."""
        begin, ended = time.monotonic() if begin is None else begin, [] if ended is None else ended
        running: list[asyncio.Task[None]] = []
        for job in jobs:
            request = self._request(job)  # made before its time, not at it
            await asyncio.sleep(begin + job.at_s - time.monotonic())
            running.append(asyncio.create_task(self._one(job, request, begin, job.at_s, ended)))
        await asyncio.gather(*running)
        return ended

    async def closed(
        self, jobs: Sequence[Job], concurrency: int, begin: float | None = None, ended: list[Outcome] | None = None
    ) -> list[Outcome]:
        """Send `concurrency` jobs at a time, the next as one ends. Otherwise as `open`."""
        begin, ended = time.monotonic() if begin is None else begin, [] if ended is None else ended
        waiting = iter(jobs)

        async def work() -> None:
            for job in waiting:
                request = self._request(job)
                await self._one(job, request, begin, time.monotonic() - begin, ended)

        await asyncio.sleep(begin - time.monotonic())
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return ended

    def _request(self, job: Job) -> Any:
        return self._prepared.pop(job.index, None) or self._backend.make(job)

    async def _one(self, job: Job, request: Any, begin: float, intended_s: float, ended: list[Outcome]) -> None:
        outcome = Outcome(job.index, intended_s, job.num_prompt)
        clock, num_messages, longest_gap = time.monotonic, 0, 0.0
        at = first = last = outcome.sent_s = clock() - begin
        try:
            async for num_tokens in self._backend.stream(request, outcome):
                at = clock() - begin
                if num_messages == 0:
                    first = at
                elif at - last > longest_gap:
                    longest_gap = at - last
                last, num_messages = at, num_messages + 1
                outcome.num_output += num_tokens
            if not num_messages:  # an answer without text: its end counts as its first token
                first = last = clock() - begin
        except CallFailed as failed:
            outcome.status, outcome.reason = failed.status, failed.reason
            last = clock() - begin
        outcome.first_s, outcome.last_s = first, last
        outcome.num_messages, outcome.longest_gap_s = num_messages, longest_gap
        ended.append(outcome)
        self._on_end(outcome.latencies)
