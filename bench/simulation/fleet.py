"""A fleet that serves a trace in simulated time, routed by gateway/routing/routing.py unchanged.

Modelled: prompts one after the other on a prefill worker, and in chunks between steps on a decode worker; steps that
take longer the more sequences run; an LRU prefix cache on every worker; KV that moves while a prompt is read, one
transfer at a time into and out of a worker; a queue in front of full decode workers. Not modelled: failures, attention
that grows with the context, and late reports (the gateway counts what it sent itself)."""

import heapq
import itertools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from baton.loadgen.trace import MOONCAKE_BLOCK as BLOCK
from baton.loadgen.trace import TraceEntry
from baton.service.slo import Slo
from gateway.fleet.candidates import NUM_SEEN
from gateway.prefix.prefix_matches import NO_WORKERS, Matches, WorkerBits
from gateway.routing.latency_model import PaceEstimator, RecentLoad
from gateway.routing.routing import (
    NUM_HOLDERS,
    Candidate,
    Decision,
    RoutingRequest,
    WorkerLimits,
    choose,
    choose_holder,
    shortlist,
)

_WORDS, _TRANSPORTS = frozenset(["kv"]), frozenset(["tcp"])


class Machine(NamedTuple):
    """Speeds and sizes of a worker: about those of an 8B model with KV in 8 bits on a large GPU."""

    prompt_s: float = 0.01
    token_s: float = 1 / 20_000
    step_s: float = 0.012
    sequence_s: float = 0.0003
    chunk: int = 2048  # tokens of a prompt between two decode steps
    token_bytes: int = 65_536
    byte_s: float = 1 / 10e9
    hop_s: float = 0.002
    cached_tokens: int = 1_000_000
    max_sequences: int = 128


@dataclass(slots=True, eq=False)
class Request:
    entry: TraceEntry
    at_s: float
    number: int = 0  # in the trace
    num_cached: int = 0  # prompt tokens that no worker had to compute
    is_local: bool = False
    predicted_s: float = 0.0
    first_s: float = 0.0  # time of the first token
    last_s: float = 0.0
    num_read: int = 0  # prompt tokens that are computed
    decision: Decision | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.entry.num_output - 1) if self.entry.num_output > 1 else None


class Index:
    """Block -> the workers that have it, one bit each."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = defaultdict(int)
        self.worker_bits = NO_WORKERS
        self.rng = random.Random(1)

    def lookup(self, hash_ids: Sequence[int]) -> Matches:
        """Return the matches in blocks of the trace, where gateways count spans."""
        return Matches((self.masks.get(hash_id, 0) for hash_id in hash_ids), self.worker_bits, self.rng)

    def clear(self) -> None:
        self.masks = defaultdict(int)


class Worker:
    """The state of a worker in either role: a cache, a link to the network, and its measured speed."""

    def __init__(self, number: int, name: str, machine: Machine, index: Index, fleet: PaceEstimator):
        self.number, self.name, self.machine = number, name, machine
        self.pace_estimator, self.recent_load = PaceEstimator(fleet), RecentLoad()
        self.num_waiting_tokens = self.num_sequences = 0
        self.in_free_s = self.out_free_s = 0.0
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._index, self._bit = index, 1 << number

    def num_matched(self, entry: TraceEntry) -> int:
        num = 0
        for hash_id in entry.hash_ids:
            if hash_id not in self._blocks:
                break
            num += 1
        return self.in_tokens(num, entry)

    @staticmethod
    def in_tokens(num_blocks: int, entry: TraceEntry) -> int:
        return min(num_blocks * BLOCK, entry.num_prompt - 1)

    def keep(self, hash_ids: Sequence[int]) -> None:
        """Add a prompt's blocks to the cache; its last block is evicted first."""
        blocks, masks, bit = self._blocks, self._index.masks, self._bit
        for hash_id in reversed(hash_ids):
            if hash_id in blocks:
                blocks.move_to_end(hash_id)
            else:
                blocks[hash_id] = None
                masks[hash_id] |= bit
        while len(blocks) > self.machine.cached_tokens // BLOCK:
            masks[blocks.popitem(last=False)[0]] &= ~bit

    def announce(self) -> None:
        """Report the cache to an index that has come back empty."""
        for hash_id in self._blocks:
            self._index.masks[hash_id] |= self._bit

    def candidate(self, num_matched: int, now: float) -> Candidate:
        machine = self.machine
        return Candidate(
            self.name, num_matched, self.num_sequences, self.num_waiting_tokens, WorkerLimits(1 << 20), _WORDS, _WORDS, _TRANSPORTS,
            self.name, machine.token_bytes, None, machine.max_sequences, None, self.recent_load.utilization(now),
            self.pace_estimator.pace(now),
        )  # fmt: skip


class PrefillWorker(Worker):
    def __init__(self, *args):
        super().__init__(*args)
        self.queue: deque[tuple[Request, Callable[[float, float], None]]] = deque()
        self.is_busy = False
        self.work_s = 0.0


class DecodeWorker(Worker):
    """A decode worker. Single steps are not simulated: everything running advances at one rate between two events."""

    def __init__(self, *args):
        super().__init__(*args)
        self.steps = self.at_s = 0.0
        self.sequence_s = 0.0  # sequences times the seconds that they ran
        self.ends: list[tuple[float, int, Request]] = []
        self.reading: deque[list] = deque()  # [tokens left, request]
        self.version = 0

    def speeds(self) -> tuple[float, float]:
        """Return (steps a second, prompt tokens a second)."""
        machine, num = self.machine, len(self.ends)
        step_s = machine.step_s + machine.sequence_s * num
        if not self.reading:
            return (1 / step_s if num else 0.0), 0.0
        if not num:
            return 0.0, 1 / machine.token_s
        mixed_s = step_s + machine.chunk * machine.token_s
        return 1 / mixed_s, machine.chunk / mixed_s

    def advance(self, now: float) -> None:
        steps_per_s, tokens_per_s = self.speeds()
        self.steps += steps_per_s * (now - self.at_s)
        if self.reading:
            self.reading[0][0] -= tokens_per_s * (now - self.at_s)
        self.sequence_s += len(self.ends) * (now - self.at_s)
        self.at_s = now


class Fleet:
    """A simulated fleet: `run()` serves all requests. `prefill_share` of the workers only prefill."""

    def __init__(
        self,
        num_workers: int,
        machine: Machine,
        split: str,
        slo: Slo,
        prefill_share: float = 0.5,
        decided: Mapping[int, Decision] = MappingProxyType({}),
        turned: int | None = None,
    ):
        """Make the fleet. `decided`: requests by their position in the trace with a fixed decision; `turned`: one that
        takes the opposite of its decision."""
        self._index, self._pace_estimator = Index(), PaceEstimator()  # of all workers
        common = machine, self._index, self._pace_estimator
        half = round(num_workers * prefill_share)
        self.prefill = [PrefillWorker(i, f"p{i:04}", *common) for i in range(half)]
        self.decode = [DecodeWorker(i, f"d{i:04}", *common) for i in range(half, num_workers)]
        self.workers: list[Worker] = [*self.prefill, *self.decode]
        self._index.worker_bits = WorkerBits.of({worker.number: worker for worker in self.workers})
        self._named = {worker.name: worker for worker in self.workers}
        self._machine, self._split, self._slo = machine, split, slo
        self._rng = random.Random(0)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._waiting: deque[Request] = deque()
        self._mean_output = 64.0
        self._decided, self._turned = decided, turned

    def run(self, entries: Sequence[TraceEntry]) -> list[Request]:
        requests = [Request(entry, entry.at_s, i) for i, entry in enumerate(entries)]
        arrivals = iter(requests)

        def arrive(now: float, request: Request) -> None:
            self._arrive_next(arrivals, arrive)
            self._waiting.append(request)
            self._serve_waiting(now)

        self._arrive_next(arrivals, arrive)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return requests

    def _arrive_next(self, arrivals, arrive) -> None:
        if (request := next(arrivals, None)) is not None:
            self.at(request.at_s, lambda now: arrive(now, request))

    def at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    # ---- routing ----

    def _serve_waiting(self, now: float) -> None:
        """Serve waiting requests in order; the first waits until a decode worker has room."""
        while self._waiting:
            request = self._waiting[0]
            decision = request.decision = self._decided.get(request.number) or self._route(request, now)
            taker = self._named[decision.decode]
            if taker.num_sequences >= self._machine.max_sequences:
                return
            self._waiting.popleft()
            request.predicted_s = now - request.at_s + decision.ttft_s
            request.is_local = decision.is_local
            taker.num_sequences += 1
            taker.recent_load.add(self._mean_output * self._machine.sequence_s, now)
            if decision.is_local:
                self._read_here(request, taker, now)
            else:
                self._read_there(request, self._named[decision.prefill], taker, now)

    def _route(self, request: Request, now: float) -> Decision:
        entry = request.entry
        matches = self._index.lookup(entry.hash_ids)

        def side(workers: list, kind: type) -> list[Candidate]:
            seen = itertools.islice(matches, NUM_SEEN)
            holders = (worker for worker in seen if isinstance(worker, kind))
            chosen = shortlist(holders, workers, lambda worker: True, self._rng)
            return [worker.candidate(worker.in_tokens(matches.get(worker), entry), now) for worker in chosen]

        ask = RoutingRequest(entry.num_prompt, entry.num_prompt + 1, self._mean_output, self._slo)
        prefill, decode = side(self.prefill, PrefillWorker), side(self.decode, DecodeWorker)
        decision = choose(ask, prefill, decode, self._split)
        if request.number == self._turned:
            return choose(ask, prefill, decode, "always" if decision.is_local else "never")
        return decision

    # ---- a prefill worker ----

    def _read_there(self, request: Request, source: PrefillWorker, taker: DecodeWorker, now: float) -> None:
        entry = request.entry
        request.num_cached = source.num_matched(entry)
        pulled_s = now
        reader = source.candidate(request.num_cached, now)
        holders = itertools.islice(self._index.lookup(entry.hash_ids), NUM_HOLDERS)
        offers = [holder.candidate(holder.num_matched(entry), now) for holder in holders]
        if (holder := choose_holder(reader, offers)) is not None:
            num_bytes = (holder.num_matched_tokens - request.num_cached) * self._machine.token_bytes
            pulled_s = self._move(self._named[holder.name], source, num_bytes, now) + self._machine.hop_s
            request.num_cached = holder.num_matched_tokens
        request.num_read = entry.num_prompt - request.num_cached
        source.num_waiting_tokens += request.num_read
        source.recent_load.add(request.num_read * self._machine.token_s, now)

        def read(began: float, now: float) -> None:
            request.first_s = now + self._machine.hop_s
            source.keep(entry.hash_ids)
            missing = entry.num_prompt - taker.num_matched(entry)
            arrived = max(now, self._move(source, taker, missing * self._machine.token_bytes, began))
            num_late = max(0.0, arrived - now) / self._machine.byte_s
            taker.pace_estimator.note_transfer(int(num_late), arrived + self._machine.hop_s - now, now)
            self.at(arrived + self._machine.hop_s, lambda now: self._join(request, taker, now))

        self.at(pulled_s, lambda now: self._enqueue(request, source, read, now))

    def _enqueue(self, request: Request, source: PrefillWorker, read, now: float) -> None:
        source.queue.append((request, read))
        if not source.is_busy:
            self._read_next(source, now)

    def _read_next(self, source: PrefillWorker, now: float) -> None:
        source.is_busy = bool(source.queue)
        if not source.queue:
            return
        request, read = source.queue.popleft()
        seconds = self._machine.prompt_s + request.num_read * self._machine.token_s

        def done(end: float) -> None:
            source.num_waiting_tokens -= request.num_read
            source.work_s += seconds
            source.pace_estimator.note_prefill(request.num_read, seconds, end)
            read(now, end)
            self._read_next(source, end)

        self.at(now + seconds, done)

    def _move(self, source: Worker, taker: Worker, num_bytes: float, now: float) -> float:
        """Move KV, and return when it arrives."""
        begin = max(now, source.out_free_s, taker.in_free_s)
        source.out_free_s = taker.in_free_s = end = begin + num_bytes * self._machine.byte_s
        return end

    # ---- a decode worker ----

    def _read_here(self, request: Request, worker: DecodeWorker, now: float) -> None:
        entry = request.entry
        request.num_cached = worker.num_matched(entry)
        request.num_read = entry.num_prompt - request.num_cached
        worker.num_waiting_tokens += request.num_read
        worker.recent_load.add(request.num_read * self._machine.token_s, now)
        worker.advance(now)
        worker.reading.append([request.num_read + self._machine.prompt_s / self._machine.token_s, request])
        self._plan(worker, now)

    def _join(self, request: Request, worker: DecodeWorker, now: float) -> None:
        """Start a request whose first token is out and whose KV has arrived."""
        worker.keep(request.entry.hash_ids)
        worker.advance(now)
        left = max(0, request.entry.num_output - 1)
        heapq.heappush(worker.ends, (worker.steps + left, next(self._order), request))
        self._plan(worker, now)

    def _plan(self, worker: DecodeWorker, now: float) -> None:
        """Schedule the worker's next event, as far as known now."""
        steps_per_s, tokens_per_s = worker.speeds()
        times = []
        if worker.ends:
            times.append(max(0.0, worker.ends[0][0] - worker.steps) / steps_per_s)
        if worker.reading:
            times.append(max(0.0, worker.reading[0][0]) / tokens_per_s)
        if times:
            worker.version = version = worker.version + 1
            self.at(now + min(times), lambda now: self._step(worker, version, now))

    def _step(self, worker: DecodeWorker, version: int, now: float) -> None:
        if version != worker.version:
            return
        worker.advance(now)
        if worker.reading and worker.reading[0][0] < 1e-6:
            request = worker.reading.popleft()[1]
            request.first_s = now
            worker.num_waiting_tokens -= request.num_read
            worker.pace_estimator.note_prefill(request.num_read, request.num_read * self._machine.token_s, now)
            self._join(request, worker, now)
        while worker.ends and worker.ends[0][0] - worker.steps < 1e-6:
            self._end(heapq.heappop(worker.ends)[2], worker, now)
        self._plan(worker, now)
        self._serve_waiting(now)

    def _end(self, request: Request, worker: DecodeWorker, now: float) -> None:
        request.last_s = max(now, request.first_s)
        if request.tpot_s:
            worker.pace_estimator.note_decode(worker.num_sequences, request.tpot_s, now)
        worker.num_sequences -= 1
        self._mean_output += 0.01 * (request.entry.num_output - self._mean_output)


# ---- upper bounds ----


def oracle_hits(entries: Sequence[TraceEntry], cached_tokens: int | None) -> int:
    """Return the prompt tokens that one LRU cache of `cached_tokens` tokens, which every request reaches at no cost,
    would have had; None: an unbounded cache. Each prompt is cached as soon as it arrives."""
    blocks: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for entry in entries:
        num = 0
        for hash_id in entry.hash_ids:
            if hash_id not in blocks:
                break
            num += 1
        num_hits += min(num * BLOCK, entry.num_prompt - 1)
        for hash_id in reversed(entry.hash_ids):
            blocks[hash_id] = None
            blocks.move_to_end(hash_id)
        while cached_tokens is not None and len(blocks) > cached_tokens // BLOCK:
            blocks.popitem(last=False)
    return num_hits


def copies(entries: Sequence[TraceEntry], num: int, spread_s: float = 30.0) -> list[TraceEntry]:
    """Return `num` copies of the trace, each a little later than the previous one. They share the trace's first block,
    as all of its requests do, and nothing else."""
    common = entries[0].hash_ids[:1]
    rng = random.Random(0)
    made = []
    for copy in range(num):
        later_s = rng.uniform(0, spread_s) if copy else 0.0
        for entry in entries:
            hash_ids = tuple(i if (i,) == common else i + (copy << 32) for i in entry.hash_ids)
            made.append(TraceEntry(entry.at_s + later_s, entry.num_prompt, entry.num_output, hash_ids))
    return sorted(made, key=lambda entry: entry.at_s)
