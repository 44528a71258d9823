"""Plan requests and their times: jobs from a trace or drawn, with prompts that share the prefixes that the trace
names."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.loadgen.trace import MOONCAKE_BLOCK, TraceEntry

FIRST_TOKEN = 5  # ids below are special in the models that we know of
_SHARED_STREAM, _OWN_STREAM = 1, 2  # of random numbers: blocks of hash ids, and what belongs to one job alone


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `at_s`: when to send it, in seconds after the run's start; 0 in a closed loop. `token_ids`: its
    prompt, where prompt_ids() is not to draw one."""

    index: int
    at_s: float
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()
    block: int = MOONCAKE_BLOCK  # tokens behind one hash id
    token_ids: tuple[int, ...] = ()


def prompt_ids(job: Job, vocab_size: int, seed: int) -> list[int]:
    """Return token ids [num_prompt]: the job's own, or drawn; blocks of equal hash ids are equal in all jobs."""
    if job.token_ids:
        return list(job.token_ids)
    ids: list[int] = []
    for hash_id in job.hash_ids:
        ids += _draw(f"{seed} {_SHARED_STREAM} {hash_id}", job.block, vocab_size)
    if (missing := job.num_prompt - len(ids)) > 0:
        ids += _draw(f"{seed} {_OWN_STREAM} {job.index}", missing, vocab_size)
    return ids[: job.num_prompt]


def _draw(seed: str, num: int, vocab_size: int) -> list[int]:
    """Return `num` ids that depend on `seed` alone. A hash's stream: making one of numpy's generators takes longer than
    all else that is done for a request of 256 tokens."""
    import numpy as np  # here: other commands start without it

    words = np.frombuffer(hashlib.shake_128(seed.encode()).digest(4 * num), "<u4")
    return (words % (vocab_size - FIRST_TOKEN) + FIRST_TOKEN).tolist()


def from_trace(entries: Sequence[TraceEntry], rate_scale: float, length_scale: float, limit: int | None) -> list[Job]:
    """The trace, `rate_scale` times as fast, its lengths times `length_scale` (blocks too, so that sharing stays)."""
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
    """Mean numbers of tokens of a request; the first `shared` of its prompt are the same in all, as a system prompt
    is."""

    prompt: int
    output: int
    shared: int = 0


# Sized for small contexts too: proportions of what people send, not their lengths on large models.
WORKLOADS = {
    "short": Shape(256, 32),
    "chat": Shape(384, 128, shared=128),
    "summarise": Shape(1500, 96),
    "agent": Shape(1200, 48, shared=1024),
    "code": Shape(640, 160, shared=64),
    "long": Shape(6000, 64),
}


def drawn(rng: random.Random, times: Iterator[float], num: int, shape: Shape) -> list[Job]:
    """Return `num` jobs whose lengths vary by a quarter around the means of `shape`; of a prompt what it does not
    share."""
    shared, block = ((0,), shape.shared) if shape.shared else ((), MOONCAKE_BLOCK)
    own = shape.prompt - shape.shared
    return [
        Job(index, next(times), shape.shared + _around(rng, own), _around(rng, shape.output), shared, block)
        for index in range(num)
    ]


def _around(rng: random.Random, mean: int) -> int:
    return max(1, round(mean * rng.uniform(0.75, 1.25)))


def arrivals(kind: str, rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds after the start, without end. poisson: independent; constant: evenly; burst: eight at once, Poisson."""
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
    """Jobs that the model can hold, and how many were cut: outputs to an eighth of the context at most, then
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
    """Every `num`-th job to each of `num` senders."""
    return [list(jobs[first::num]) for first in range(min(num, max(1, len(jobs))))]
