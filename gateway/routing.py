"""Which workers serve a request: a pure function of what is cached where, and of how busy who is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

SPLITS = ("auto", "always", "never")
# Up to here the round trips of a split cost more than reading the prompt beside the running batch.
SHORT_TOKENS = 64
# Nobody is disturbed on an idle decode worker, so a little more is worth reading there.
IDLE_TOKENS = 128
# One chunk at most may be read beside a running batch, and only if a prefill worker would have to read much more.
HOT_TOKENS, HOT_RATIO = 512, 4
# Pulling a prefix instead of computing it: one more round trip and a dialogue, then bytes. On one host at less than half
# of what bench/handoff.py sees through shared memory, since others move KV too; between hosts what 10 GbE carries.
_PULL_S = 0.005
_PULL_HERE_BYTES_PER_S, _PULL_BYTES_PER_S = 2e9, 1e9
# A worker that has not prefilled yet is taken for one that computes at this rate; the first long prompt says better.
_PREFILL_TOKENS_PER_S = 5_000.0
# A sequence that runs on a decode worker weighs like this many tokens of KV to be moved to another one.
_SEQUENCE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that serves. Numbers of tokens and sequences; `kv_gives` and `kv_takes` are opaque words of workers: KV
    of one may feed another where they have one in common."""

    name: str
    num_matched_tokens: int
    num_sequences: int
    num_waiting_tokens: int
    max_model_len: int
    kv_gives: frozenset[str]
    kv_takes: frozenset[str]
    transports: frozenset[str]
    host_id: str
    kv_token_bytes: int = 0  # of KV, all layers; 0: it does not say
    prefill_tokens_per_s: float = 0.0  # as measured; 0: not yet


@dataclass(frozen=True, slots=True)
class Decision:
    """`prefill` is None when the decode worker reads the prompt itself. `reason` is a short stable word; `alternative`
    the best of the other way: "PREFILL > DECODE", "DECODE alone" or "none"."""

    prefill: str | None
    decode: str
    reason: str
    alternative: str = field(default="none", compare=False)

    @property
    def local(self) -> bool:
        return self.prefill is None


class NoRoute(Exception):
    """Nobody can serve this; one line says why."""


def choose(
    num_tokens: int, max_len: int, prefill: Sequence[Candidate], decode: Sequence[Candidate], split: str = "auto"
) -> Decision:
    """Workers for a prompt of `num_tokens` that may grow to `max_len`. Raises NoRoute."""
    decode = [worker for worker in decode if worker.max_model_len >= max_len]
    if not decode:
        raise NoRoute("no decode worker serves")
    prefill = [] if split == "never" else [worker for worker in prefill if worker.max_model_len >= num_tokens]
    pairs = [(p, d) for p in prefill for d in decode if compatible(p, d)]
    if pairs:
        # Of equal pairs the first: names break ties, so that a choice can be explained.
        source, taker = min(pairs, key=lambda pair: (_pair_cost(num_tokens, *pair), pair[0].name, pair[1].name))
    elif split == "always":
        raise NoRoute("no prefill worker serves that a decode worker can take KV from")
    here = min(decode, key=lambda worker: (_local_cost(num_tokens, worker), worker.name))
    if not pairs:
        return Decision(None, here.name, "forced" if split == "never" else "no_prefill_worker")
    if split == "auto" and (reason := _why_local(num_tokens, here, source)):
        return Decision(None, here.name, reason, f"{source.name} > {taker.name}")
    return Decision(source.name, taker.name, "forced" if split == "always" else "long_prompt", f"{here.name} alone")


def choose_source(num_tokens: int, prefill: Sequence[Candidate], taker: Candidate) -> Candidate | None:
    """The best prefill worker for a decode worker that is chosen already."""
    sources = [worker for worker in prefill if compatible(worker, taker)]
    return min(sources, key=lambda worker: (_pair_cost(num_tokens, worker, taker), worker.name), default=None)


def choose_holder(reader: Candidate, holders: Sequence[Candidate]) -> Candidate | None:
    """Who has a longer prefix of the prompt than `reader`, which is to prefill it, where pulling that is quicker than
    computing it: who saves the most time, of equals the first by name. None: nobody saves any."""

    def gain_s(holder: Candidate) -> float:
        num_tokens = holder.num_matched_tokens - reader.num_matched_tokens
        rate = _PULL_HERE_BYTES_PER_S if holder.host_id == reader.host_id else _PULL_BYTES_PER_S
        pull_s = _PULL_S + num_tokens * holder.kv_token_bytes / rate
        return num_tokens / (reader.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S) - pull_s

    known = [holder for holder in holders if holder.kv_token_bytes and compatible(holder, reader)]
    best = min(known, key=lambda holder: (-gain_s(holder), holder.name), default=None)
    return best if best and gain_s(best) > 0 else None


def compatible(source: Candidate, taker: Candidate) -> bool:
    """KV of one may feed the other, converted where their forms differ, and there is a way for it."""
    if not source.kv_gives & taker.kv_takes or source.name == taker.name:
        return False
    shared = source.transports & taker.transports
    return bool(shared - {"shm"}) or ("shm" in shared and source.host_id == taker.host_id)


def _missing(num_tokens: int, worker: Candidate) -> int:
    return num_tokens - worker.num_matched_tokens


def _why_local(num_tokens: int, here: Candidate, source: Candidate) -> str | None:
    missing = _missing(num_tokens, here)
    if num_tokens <= SHORT_TOKENS:
        return "short_prompt"
    if missing <= SHORT_TOKENS:
        return "hot_cache"
    if missing <= IDLE_TOKENS and here.num_sequences == 0:
        return "idle"
    if missing <= HOT_TOKENS and missing * HOT_RATIO <= _missing(num_tokens, source) + source.num_waiting_tokens:
        return "hot_cache"
    return None


def _pair_cost(num_tokens: int, source: Candidate, taker: Candidate) -> float:
    """In tokens to be read: moving one costs about an eighth of reading it."""
    reading = _missing(num_tokens, source) + source.num_waiting_tokens
    return reading + (_missing(num_tokens, taker) + _SEQUENCE_TOKENS * taker.num_sequences) / 8


def _local_cost(num_tokens: int, worker: Candidate) -> float:
    return _missing(num_tokens, worker) + worker.num_waiting_tokens + _SEQUENCE_TOKENS * worker.num_sequences / 8
