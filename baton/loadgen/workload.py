"""Plan requests and their times: jobs from a trace or drawn at random, with prompts that share the trace's prefixes."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.loadgen.trace import MOONCAKE_BLOCK, TraceEntry

FIRST_TOKEN = 5  # lower ids are special tokens in all models that we know
# of random numbers: for blocks of shared prefixes, and for the rest of one job's prompt
_SHARED_STREAM, _OWN_STREAM = 1, 2


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `at_s`: when to send it, in seconds after the run's start; 0 in a closed loop. `token_ids`: its
    prompt, unless prompt_ids() should draw one."""

    index: int
    at_s: float
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()
    block: int = MOONCAKE_BLOCK  # tokens per hash id
    token_ids: tuple[int, ...] = ()


def prompt_ids(job: Job, vocab_size: int, seed: int) -> list[int]:
    """Return token ids [num_prompt]: the job's own, or drawn; blocks with equal hash ids are equal in all jobs."""
    if job.token_ids:
        return list(job.token_ids)
    ids: list[int] = []
    for hash_id in job.hash_ids:
        ids += _draw(f"{seed} {_SHARED_STREAM} {hash_id}", job.block, vocab_size)
    if (missing := job.num_prompt - len(ids)) > 0:
        ids += _draw(f"{seed} {_OWN_STREAM} {job.index}", missing, vocab_size)
    return ids[: job.num_prompt]


def _draw(seed: str, num: int, vocab_size: int) -> list[int]:
    """Return `num` ids that depend on `seed` only. They are a hash's stream, since making one of numpy's generators
    takes longer than everything else for a request of 256 tokens."""
    import numpy as np  # imported here, since other commands start without numpy

    words = np.frombuffer(hashlib.shake_128(seed.encode()).digest(4 * num), "<u4")
    return (words % (vocab_size - FIRST_TOKEN) + FIRST_TOKEN).tolist()


def from_trace(entries: Sequence[TraceEntry], rate_scale: float, length_scale: float, limit: int | None) -> list[Job]:
    """Return the jobs of a trace, `rate_scale` times as fast and with lengths times `length_scale`. Blocks are scaled
    too, so that the sharing stays."""
    return [
        Job(
            index,
            entry.at_s / rate_scale,
            max(1, round(entry.num_prompt * length_scale)),
            max(1, round(entry.num_output * length_scale)),
            entry.hash_ids,
            max(1, round(entry.block * length_scale)),
        )
        for index, entry in enumerate(entries[:limit])
    ]


class Shape(NamedTuple):
    """Mean numbers of tokens of a request. The first `shared` tokens of its prompt are the same in all requests, like a
    system prompt."""

    prompt: int
    output: int
    shared: int = 0


# Sized to fit small contexts too: they have the proportions of real requests, not their lengths on large models.
WORKLOADS = {
    "short": Shape(256, 32),
    "chat": Shape(384, 128, shared=128),
    "summarise": Shape(1500, 96),
    "agent": Shape(1200, 48, shared=1024),
    "code": Shape(640, 160, shared=64),
    "long": Shape(6000, 64),
}


def drawn(rng: random.Random, times: Iterator[float], num: int, shape: Shape) -> list[Job]:
    """Return `num` jobs whose lengths vary by a quarter around the means of `shape`; the shared part of prompts does
    not vary."""
    shared, block = ((0,), shape.shared) if shape.shared else ((), MOONCAKE_BLOCK)
    own = shape.prompt - shape.shared
    return [
        Job(index, next(times), shape.shared + _around(rng, own), _around(rng, shape.output), shared, block)
        for index in range(num)
    ]


def _around(rng: random.Random, mean: int) -> int:
    return max(1, round(mean * rng.uniform(0.75, 1.25)))


def arrivals(kind: str, rate: float, rng: random.Random) -> Iterator[float]:
    """Yield times in seconds after the start, endlessly. poisson: independent; constant: even; burst: eight at once,
    with Poisson gaps."""
    at_s, burst = 0.0, 8
    while True:
        if kind == "constant":
            yield at_s
            at_s += 1 / rate
        elif kind == "poisson":
            at_s += rng.expovariate(rate)
            yield at_s
        else:
            at_s += rng.expovariate(rate / burst)
            yield from [at_s] * burst


def fitted(jobs: Sequence[Job], context: int) -> tuple[list[Job], int]:
    """Return jobs that fit the context, and how many were cut: outputs to an eighth of the context at most, then
    prompts."""
    longest_output = max(1, context // 8)
    cut, result = 0, []
    for job in jobs:
        num_output = min(job.num_output, longest_output)
        num_prompt = min(job.num_prompt, context - num_output - 1)
        cut += (num_prompt, num_output) != (job.num_prompt, job.num_output)
        result.append(Job(job.index, job.at_s, num_prompt, num_output, job.hash_ids, job.block))
    return result, cut


def shares(jobs: Sequence[Job], num: int) -> list[list[Job]]:
    """Return the jobs of each of `num` senders: every `num`-th job."""
    return [list(jobs[first::num]) for first in range(min(num, max(1, len(jobs))))]
