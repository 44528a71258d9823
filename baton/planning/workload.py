"""The requests of a plan: from a trace, or drawn at a rate with given lengths."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

from baton.loadgen.trace import TraceEntry
from baton.loadgen.workload import Shape, arrivals, drawn
from kvtransfer.naming import SPAN_TOKENS

_SEED = 0  # so that a plan is the same each time


def drawn_entries(rate: float, shape: Shape, num: int) -> list[TraceEntry]:
    """Return requests with Poisson arrivals, `rate` a second, and lengths around the means of `shape`."""
    rng = random.Random(_SEED)
    jobs = drawn(rng, arrivals("poisson", rate, rng), num, shape)
    return [TraceEntry(job.at_s, job.num_prompt, job.num_output, job.hash_ids, job.block) for job in jobs]


def fitting(entries: Sequence[TraceEntry], context: int) -> list[TraceEntry]:
    """Return the requests that fit the context. Raises ValueError if others leave too few."""
    found = [entry for entry in entries if entry.num_prompt + max(1, entry.num_output) <= context]
    if len(found) < len(entries) and (len(found) < 2 or found[-1].at_s <= found[0].at_s):
        fit = f"{len(found)} of {len(entries)} requests fit into a context of {context}"
        raise ValueError(f"{fit}: too few to plan by")
    return found


def at_rate(entries: Sequence[TraceEntry], rate: float) -> list[TraceEntry]:
    """Return requests scaled to `rate` requests a second."""
    first, span = entries[0].at_s, entries[-1].at_s - entries[0].at_s
    scale = len(entries) / rate / span
    return [replace(entry, at_s=(entry.at_s - first) * scale, num_output=max(1, entry.num_output)) for entry in entries]


def span_names(entry: TraceEntry, number: int) -> tuple[bytes, ...]:
    """Return names of a prompt's spans: equal if the trace says that the prefixes are, and unique to request `number`
    after them. Empty if the trace says nothing of prefixes."""
    if not entry.hash_ids:
        return ()
    names: list[bytes] = []
    parent, num_spans = b"", entry.num_prompt // SPAN_TOKENS
    for hash_id in entry.hash_ids:
        num_bytes = max(16, hash_id.bit_length() // 8 + 1)  # some traces have whole digests as ids
        parent = hashlib.sha256(parent + hash_id.to_bytes(num_bytes, "little", signed=True)).digest()
        names += [parent[:31] + bytes([place]) for place in range(entry.block // SPAN_TOKENS)]
    for place in range(len(names), num_spans):
        names.append(hashlib.sha256(f"{number} {place}".encode()).digest())
    return tuple(names[:num_spans])


def mean_fresh(entries: Sequence[TraceEntry]) -> float:
    """Return the mean number of prompt tokens that no earlier prompt had. At least one token of each prompt is read."""
    seen, num_fresh = set[bytes](), 0
    for number, entry in enumerate(entries):
        names = span_names(entry, number)
        num_fresh += max(1, entry.num_prompt - SPAN_TOKENS * len(seen.intersection(names)))
        seen.update(names)
    return num_fresh / len(entries)
