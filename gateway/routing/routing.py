"""Choose the workers for a request: a pure function of what is cached where, how busy each worker is, and how fast it
has been.

Every route is priced in seconds: until the first token, from there to the last, and how much longer other requests wait
because of it. A request looks at a bounded number of workers (`shortlist`), so a decision costs the same among eight
and a thousand.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from baton.protocol import ADAPTER_LOADING, ADAPTER_SLOTS, DEFAULT_TENANT, NO_ADAPTER, TOO_LONG
from baton.service.slo import Slo
from gateway.routing.latency_model import Pace
from kvtransfer.capabilities import RUNS_TRANSPORTS, SAME_HOST_TRANSPORTS

# Up to this length the round trips of a split cost more than reading the prompt beside the running batch.
SHORT_TOKENS = 64
# Refusals by a worker that can never take the request, however long it waits.
NEVER_HERE = frozenset((TOO_LONG, NO_ADAPTER))
# Refusals because of the request's adapter alone: other requests may find room meanwhile.
AWAITS_ADAPTER = frozenset((ADAPTER_LOADING, ADAPTER_SLOTS))
# How many workers of a role a request looks at: those that hold the longest prefixes, and some drawn by chance. The
# drawn ones keep gateways that know nothing of each other from all choosing the same worker (Mitzenmacher, The Power of
# Two Choices).
NUM_HOLDERS, NUM_DRAWN = 6, 10
_ALL = NUM_HOLDERS + NUM_DRAWN
# Two round trips more than on one worker: Accepted and Fetch, Done and Start.
_HOP_S = 0.002
# Pulling a prefix: an Offer and a dialogue, then bytes. The rates hold until bytes are measured: on one host less than
# half of what bench/handoff.py sees through shared memory, since others move KV too; between hosts what 10 GbE carries.
_PULL_S = 0.005
_SAME_HOST_BYTE_S, _BYTE_S = 1 / 2e9, 1 / 1e9
_NUM_PULLED_FROM = 3  # holders of the longest prefixes that are priced as a source
# The weight of a second beyond the bound of a class, of this request's or of one that runs.
_LATE = 4.0
_ADAPTER_S = 0.1  # to load an adapter in place of another
_FULL_S = 10.0  # added for a worker without room, which would refuse: any other comes first
Item = TypeVar("Item")


class WorkerLimits(NamedTuple):
    """The requests that a worker can hold, as it says in Hello."""

    max_model_len: int
    num_blocks: int = 0  # of KV; 0: it does not say
    block_size: int = 0
    features: frozenset[str] = frozenset()  # those that some requests need


class Candidate(NamedTuple):
    """A serving worker, as routing sees it. `kv_gives` and `kv_takes` are opaque labels: KV of one worker can feed
    another if they have a label in common."""

    name: str
    num_matched_tokens: int
    num_sequences: int
    num_waiting_tokens: int  # of prompts that are read there before a new one
    limits: WorkerLimits
    kv_gives: frozenset[str]
    kv_takes: frozenset[str]
    transports: frozenset[str]
    host_id: str
    kv_token_bytes: int = 0  # of KV in all layers; 0: it does not say
    num_free_tokens: int | None = None  # room for new KV; None: it has not said
    max_sequences: int | None = None
    tightest_tpot_s: float | None = None  # the strictest bound of the requests that run there
    utilization: float = 0.0  # share of its time that it was given work for recently
    pace: Pace = Pace()
    lacks_adapter: bool = False  # it holds the request's adapter, but in no slot
    kv_layout: bytes = b""  # opaque: equal layouts have equal blocks; empty: it keeps a state too
    no_kv_from: frozenset[str] = frozenset()  # names of workers from which KV does not reach it for now


class RoutingRequest(NamedTuple):
    """A request as routing sees it: `num_tokens` to read now, at most `max_len` in the end, and likely `num_output`
    more, in each of `num_choices`."""

    num_tokens: int
    max_len: int
    num_output: float = 64.0
    slo: Slo = Slo()
    num_choices: int = 1
    tenant: str = DEFAULT_TENANT
    features: frozenset[str] = frozenset()  # those that its workers must have
    adapter: bytes = b""  # identity of the adapter that it names


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen workers; `prefill` is None if the decode worker reads the prompt itself.

    `reason` is a short stable word. `alternative` is the best route of the other kind, "PREFILL > DECODE", "DECODE
    alone" or "none", and `alternative_s` its cost. `ttft_s` and `tpot_s` are predicted; `idle_ttft_s` and
    `idle_tpot_s` are what they would be if these workers were idle."""

    prefill: str | None
    decode: str
    reason: str
    alternative: str = field(default="none", compare=False)
    cost_s: float = field(default=0.0, compare=False)
    alternative_s: float | None = field(default=None, compare=False)
    ttft_s: float = field(default=0.0, compare=False)
    tpot_s: float = field(default=0.0, compare=False)
    idle_ttft_s: float = field(default=0.0, compare=False)
    idle_tpot_s: float = field(default=0.0, compare=False)
    num_matched_tokens: int = field(default=0, compare=False)  # on the worker that reads the prompt, by the index
    prefill_s: float = field(default=0.0, compare=False)  # time of the worker that reads the prompt
    decode_s: float = field(default=0.0, compare=False)  # time of the decode worker: the answer's share of the steps

    @property
    def is_local(self) -> bool:
        """Whether the decode worker reads the prompt itself."""
        return self.prefill is None


class NoRoute(Exception):
    """No worker can serve the request; the message says why, on one line."""


class _Route(NamedTuple):
    """A route with its price: a prefill and a decode worker, or a decode worker that does both."""

    cost_s: float
    prefill: Candidate | None
    decode: Candidate
    ttft_s: float
    prefill_s: float

    @property
    def label(self) -> str:
        return f"{self.prefill.name} > {self.decode.name}" if self.prefill else f"{self.decode.name} alone"


class _PrefillCost(NamedTuple):
    """The price of reading a prompt on one worker: `ttft_s` until its first token; `cost_s` also counts what others
    wait for it."""

    cost_s: float
    worker: Candidate
    ttft_s: float
    prefill_s: float


def shortlist(
    holders: Iterable[Item], everyone: Sequence[Item], is_usable: Callable[[Item], bool], rng: random.Random
) -> list[Item]:
    """Return the workers that a request looks at: all of `everyone` (which serve and can hold it) if these are few,
    else the first of `holders` (the longest prefix first) and some drawn by chance."""
    if len(everyone) <= _ALL:
        return [item for item in everyone if is_usable(item)]
    chosen: dict[Item, None] = {}
    for item in holders:
        if is_usable(item):
            chosen[item] = None
            if len(chosen) == NUM_HOLDERS:
                break
    for item in rng.sample(everyone, NUM_DRAWN):
        if is_usable(item):
            chosen[item] = None
    if chosen:
        return list(chosen)
    usable = [item for item in everyone if is_usable(item)]
    return rng.sample(usable, min(NUM_DRAWN, len(usable)))


def can_prefill(request: RoutingRequest, limits: WorkerLimits) -> bool:
    """Return whether a prefill worker can read the prompt and draw one token. The length of the answer concerns only
    the decode worker."""
    return request.num_tokens < limits.max_model_len and request.features <= limits.features


def can_decode(request: RoutingRequest, limits: WorkerLimits) -> bool:
    """Return whether a decode worker can hold a request to its end, even alone: at its longest, with the whole blocks
    of its prompt and one block more for each choice. A worker's limits thus never end an answer."""
    if request.max_len > limits.max_model_len or not request.features <= limits.features:
        return False
    if not limits.num_blocks or not limits.block_size:
        return True
    num_whole, rest = divmod(request.num_tokens, limits.block_size)
    return num_whole + request.num_choices * bool(rest) <= limits.num_blocks


def choose(
    request: RoutingRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate], split: str = "auto"
) -> Decision:
    """Return the workers for a request.

    The price of a prefill worker counts the prefix that it could pull from another of these workers. A prompt that is
    too long for every prefill worker is read where it decodes, whatever `split` says. Raises NoRoute."""
    if not decode:
        raise NoRoute("no decode worker serves")
    decode = [worker for worker in decode if can_decode(request, worker.limits)]
    if not decode:
        raise NoRoute(f"no decode worker that serves can hold {describe_needs(request)}")
    prefill = [] if split == "never" else prefill
    able = [worker for worker in prefill if can_prefill(request, worker.limits)]
    decode_costs = {worker.name: _decode_cost_s(request, worker) for worker in decode}
    split_route = _best_pair(request, able, decode, decode_costs)
    is_too_long = split_route is None and any(compatible(worker, taker) for worker in prefill for taker in decode)
    if split_route is None and split == "always" and not is_too_long:
        raise NoRoute("no prefill worker serves that a decode worker can take KV from")
    local_route = min(
        (_price_local(request, worker, decode_costs[worker.name]) for worker in decode),
        key=lambda route: (route.cost_s, route.decode.name),
    )
    if split_route is None:
        reason = "forced" if split == "never" else "too_long_to_split" if is_too_long else "no_prefill_worker"
        return _decision(request, local_route, None, reason)
    if split == "always":
        return _decision(request, split_route, local_route, "forced")
    if request.num_tokens <= SHORT_TOKENS:
        return _decision(request, local_route, split_route, "short_prompt")
    if local_route.cost_s <= split_route.cost_s or _is_ready(local_route.decode, split_route):
        return _decision(request, local_route, split_route, _local_reason(request, local_route))
    return _decision(request, split_route, local_route, "long_prompt")


def choose_prefill_for_taker(
    request: RoutingRequest, prefill: Sequence[Candidate], taker: Candidate
) -> Candidate | None:
    """Return the best prefill worker for a decode worker that was chosen before, or None if none can read the
    prompt."""
    route = _best_pair(
        request, [worker for worker in prefill if can_prefill(request, worker.limits)], [taker], {taker.name: 0.0}
    )
    return route and route.prefill


def choose_prefill_worker(request: RoutingRequest, prefill: Sequence[Candidate]) -> Candidate | None:
    """Return the prefill worker that is cheapest for a prompt whose KV nobody takes over, or None if none can read
    it."""
    costs = [_remote_prefill_cost(request, worker, ()) for worker in prefill if can_prefill(request, worker.limits)]
    best = min(costs, key=lambda cost: (cost.cost_s, cost.worker.name), default=None)
    return best and best.worker


def choose_holder(taker: Candidate, holders: Iterable[Candidate]) -> Candidate | None:
    """Return the worker with a longer prefix than `taker`'s from which pulling it saves most time over computing it (of
    equals the first by name), or None if none saves any."""
    gains = [(_gain_s(taker, holder), holder) for holder in holders]
    gain_s, best = min(gains, key=lambda each: (-each[0], each[1].name), default=(0.0, None))
    return best if gain_s > 0 else None


def compatible(source: Candidate, taker: Candidate) -> bool:
    """Return whether KV of `source` can feed `taker`, converted if their forms differ, over a common transport."""
    if source.kv_gives.isdisjoint(taker.kv_takes) or source.name == taker.name or source.name in taker.no_kv_from:
        return False
    shared = source.transports & taker.transports
    if not source.kv_layout or source.kv_layout != taker.kv_layout:
        shared -= RUNS_TRANSPORTS
    return bool(shared) and (source.host_id == taker.host_id or not shared <= SAME_HOST_TRANSPORTS)


# ---- prices, in seconds ----


def _gain_s(taker: Candidate, holder: Candidate) -> float:
    """Return the seconds that `taker` saves by pulling the prefix of `holder`; negative if it costs more."""
    num_tokens = holder.num_matched_tokens - taker.num_matched_tokens
    if num_tokens <= 0 or not holder.kv_token_bytes or not compatible(holder, taker):
        return 0.0
    pull_s = _PULL_S + num_tokens * holder.kv_token_bytes * _byte_s(holder, taker)
    return num_tokens * taker.pace.prefill_token_s - pull_s


def _byte_s(source: Candidate, taker: Candidate) -> float:
    return taker.pace.transfer_byte_s or (_SAME_HOST_BYTE_S if source.host_id == taker.host_id else _BYTE_S)


def _prefill_cost(request: RoutingRequest, worker: Candidate, gain_s: float, num_beside: float) -> _PrefillCost:
    """Return the price of reading the prompt on `worker`. `gain_s`: seconds saved by pulling a prefix; `num_beside`:
    sequences that wait meanwhile."""
    pace, missing = worker.pace, request.num_tokens - worker.num_matched_tokens
    prefill_s = max(pace.prefill_s(missing) - gain_s, pace.prefill_base_s)
    ttft_s = worker.num_waiting_tokens * pace.prefill_token_s + prefill_s
    return _PrefillCost(
        ttft_s + num_beside * prefill_s + _late_s(ttft_s, request.slo.ttft_s, 1), worker, ttft_s, prefill_s
    )


def _prefix_holders(workers: Iterable[Candidate]) -> list[Candidate]:
    """Return the few workers with the longest prefixes, from which one could be pulled, the longest first."""
    holders = [worker for worker in workers if worker.num_matched_tokens]
    return sorted(holders, key=lambda worker: (-worker.num_matched_tokens, worker.name))[:_NUM_PULLED_FROM]


def _remote_prefill_cost(request: RoutingRequest, worker: Candidate, holders: Sequence[Candidate]) -> _PrefillCost:
    """Return the price of reading the prompt on a prefill worker. One that was busy recently costs more, since others
    likely want it soon."""
    cost = _prefill_cost(
        request, worker, max((0.0, *(_gain_s(worker, holder) for holder in holders))), worker.utilization
    )
    return cost._replace(cost_s=cost.cost_s + _ADAPTER_S * worker.lacks_adapter)


def _best_pair(
    request: RoutingRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate], decode_costs: dict[str, float]
) -> _Route | None:
    """Return the cheapest pair of workers between which KV can move, or None.

    Both sides are sorted by their own prices (equals by name), so that a choice can be explained. The price of a pair
    is never below the sum of both, so the search ends where this sum exceeds the best price so far."""
    holders = _prefix_holders((*prefill, *decode))
    costs = [_remote_prefill_cost(request, worker, holders) for worker in prefill]
    costs.sort(key=lambda cost: (cost.cost_s, cost.worker.name))
    best: _Route | None = None
    for taker in sorted(decode, key=lambda worker: (decode_costs[worker.name], worker.name)):
        for cost in costs:
            least_s = cost.cost_s + decode_costs[taker.name] + _HOP_S
            if best is not None and least_s + taker.pace.transfer_base_s >= best.cost_s:
                break
            if compatible(cost.worker, taker):
                cost_s = least_s + _unhidden_s(request, cost, taker)
                if best is None or cost_s < best.cost_s:
                    best = _Route(cost_s, cost.worker, taker, cost.ttft_s + _HOP_S, cost.prefill_s)
        if best is not None and costs[0].cost_s + decode_costs[taker.name] + _HOP_S >= best.cost_s:
            break
    return best


def _unhidden_s(request: RoutingRequest, cost: _PrefillCost, taker: Candidate) -> float:
    """Return the seconds by which moving KV delays the second token, beyond those hidden behind reading the prompt."""
    num_bytes = (request.num_tokens - taker.num_matched_tokens) * taker.kv_token_bytes
    return taker.pace.transfer_base_s + max(0.0, num_bytes * _byte_s(cost.worker, taker) - cost.prefill_s)


def _is_ready(worker: Candidate, split_route: _Route) -> bool:
    """Return whether `worker` is idle and holds more of the prompt than the prefill worker of `split_route`.

    That prefill worker would compute more, or wait for KV of others. The utilization of `worker` stands for requests
    that may come to it meanwhile; no request that is here now pays for them."""
    is_idle, reader = not worker.num_sequences and not worker.num_waiting_tokens, split_route.prefill
    return is_idle and reader is not None and worker.num_matched_tokens > reader.num_matched_tokens


def _price_local(request: RoutingRequest, worker: Candidate, decode_s: float) -> _Route:
    """Return the route over one worker. All sequences there wait while the prompt is read, in one piece or in chunks
    between steps."""
    cost = _prefill_cost(request, worker, 0.0, worker.num_sequences + worker.utilization)
    return _Route(cost.cost_s + decode_s, None, worker, cost.ttft_s, cost.prefill_s)


def _decode_cost_s(request: RoutingRequest, worker: Candidate) -> float:
    """Return the price of decoding on a worker: seconds from the first token to the last, how much longer others take
    because of it, and penalties for missed bounds and missing room."""
    pace, num_beside = worker.pace, worker.num_sequences
    tpot_s = pace.tpot_s(num_beside + 1)
    cost_s = request.num_output * (tpot_s + pace.decode_sequence_s * (num_beside + worker.utilization))
    bounds = [bound for bound in (request.slo.tpot_s, worker.tightest_tpot_s) if bound is not None]
    cost_s += _late_s(tpot_s, min(bounds, default=None), request.num_output * (num_beside + 1))
    needed = request.num_tokens - worker.num_matched_tokens
    no_room = worker.num_free_tokens is not None and worker.num_free_tokens < needed
    no_place = worker.max_sequences is not None and num_beside >= worker.max_sequences
    return cost_s + _FULL_S * (no_room or no_place) + _ADAPTER_S * worker.lacks_adapter


def _late_s(predicted_s: float, bound_s: float | None, times: float) -> float:
    return 0.0 if bound_s is None else _LATE * times * max(0.0, predicted_s - bound_s)


# ---- descriptions, for errors and spans ----


def describe_needs(request: RoutingRequest) -> str:
    """Describe what can_decode asks for, for errors."""
    choices = f" in {request.num_choices} choices" if request.num_choices > 1 else ""
    features = f" and has {', '.join(sorted(request.features))}" if request.features else ""
    return f"{request.max_len} tokens{choices}{features}"


def _local_reason(request: RoutingRequest, local_route: _Route) -> str:
    if 2 * local_route.decode.num_matched_tokens >= request.num_tokens:
        return "hot_cache"
    return "idle" if local_route.decode.num_sequences == 0 else "prefill_busy"


def _decision(request: RoutingRequest, route: _Route, other: _Route | None, reason: str) -> Decision:
    pace = route.decode.pace
    return Decision(
        prefill=route.prefill and route.prefill.name,
        decode=route.decode.name,
        reason=reason,
        alternative=other.label if other else "none",
        cost_s=route.cost_s,
        alternative_s=other and other.cost_s,
        ttft_s=route.ttft_s,
        tpot_s=pace.tpot_s(route.decode.num_sequences + 1),
        idle_ttft_s=route.prefill_s + (_HOP_S if route.prefill else 0.0),
        idle_tpot_s=pace.tpot_s(1),
        num_matched_tokens=(route.prefill or route.decode).num_matched_tokens,
        prefill_s=route.prefill_s,
        decode_s=request.num_output * pace.decode_sequence_s,
    )
