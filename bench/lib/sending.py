"""Send requests of given lengths or prompts through baton.loadgen; a bench ends if one is not answered in full."""

import random
from collections.abc import Sequence

from baton.loadgen.client import Sender
from baton.loadgen.outcome import Outcome
from baton.loadgen.plan import RunPlan
from baton.loadgen.workload import FIRST_TOKEN, Job


def job_of(token_ids: Sequence[int], num_output: int, index: int = 0, at_s: float = 0.0) -> Job:
    """Return the job of this prompt: greedy and of exactly this length, since end-of-sequence ids are ignored."""
    return Job(index, at_s, len(token_ids), num_output, token_ids=tuple(token_ids))


def draw_jobs(rng: random.Random, lengths: Sequence[tuple[int, int]], vocab_size: int) -> list[Job]:
    """Return one job for each (prompt, output) length; prompts share nothing and hold no special token."""
    return [
        job_of([rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(num_prompt)], num_output, index)
        for index, (num_prompt, num_output) in enumerate(lengths)
    ]


async def connect(target: str) -> Sender:
    """Return a sender that retries refused requests: on a slow machine many concurrent ones wait longer than their
    class allows."""
    return Sender(RunPlan(target, 0, timeout_s=300.0, retries=True, keeps_tokens=True))


async def closed(sender: Sender, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
    """Send `concurrency` jobs at a time: the next begins as one ends."""
    return _whole(jobs, await sender.closed(jobs, concurrency))


async def in_batches(sender: Sender, jobs: Sequence[Job], batch_size: int) -> list[Outcome]:
    """Send `batch_size` jobs at a time: the next batch begins when the previous one has ended completely."""
    batches = [jobs[begin : begin + batch_size] for begin in range(0, len(jobs), batch_size)]
    return [outcome for batch in batches for outcome in await closed(sender, batch, batch_size)]


async def arriving(sender: Sender, jobs: Sequence[Job]) -> list[Outcome]:
    """Send each job at its time."""
    return _whole(jobs, await sender.open(jobs))


async def one(sender: Sender, job: Job) -> Outcome:
    """Send one job."""
    (outcome,) = await closed(sender, [job], 1)
    return outcome


def _whole(jobs: Sequence[Job], outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes in the order of the jobs, since they come in the order of their ends. Raises RuntimeError if
    a request failed or lacks tokens."""
    wanted = {job.index: job.num_output for job in jobs}
    for outcome in outcomes:
        if not outcome.ok:
            raise RuntimeError(f"{outcome.status}: {outcome.reason}")
        if outcome.num_output != wanted[outcome.index]:
            raise RuntimeError(f"{outcome.num_output} of {wanted[outcome.index]} tokens came")
    return sorted(outcomes, key=lambda outcome: outcome.index)
