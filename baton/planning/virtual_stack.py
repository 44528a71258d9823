"""A stack that serves a load in virtual time: the gateway's routing, queues and admission over workers with virtual
engines (virtual_engine.py). Processes of one host share its cores."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, Output, PrefillDone, Refusal, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.loadgen.trace import TraceEntry
from baton.planning.step_time import StepTimes
from baton.planning.virtual_engine import VirtualLauncher, virtual_engine
from baton.planning.workload import span_names
from baton.protocol import TOO_LONG
from baton.sampling_params import SamplingParams
from baton.service.errors import Overloaded
from baton.service.slo import Slo
from gateway.queue.waiting_queue import QueuedRequest, QueueEntry, WaitingQueue, WaitingQueues, rank
from gateway.routing.latency_model import PaceEstimator, RecentLoad
from gateway.routing.routing import Candidate, Decision, RoutingRequest, WorkerLimits, choose
from kvtransfer.naming import HASH_BYTES

_WORDS, _TRANSPORTS = frozenset(["kv"]), frozenset(["tcp", "shm"])
_MAX_WAITING = 4096
_FIRST_GUESS, _AVERAGE_WEIGHT = 64.0, 0.01  # of output lengths, as gateways average them


@dataclass(slots=True)
class ServedRequest:
    """One request with its stamps in virtual seconds. `refused`: why it was not served; empty if it was."""

    entry: TraceEntry
    number: int
    names: tuple[bytes, ...] = ()  # of the prompt's spans
    refused: str = ""
    decision: Decision | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    num_output: int = 0
    num_cached: int = 0
    queue_entry: QueueEntry | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.entry.at_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.entry.at_s

    @property
    def tpot_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.num_output - 1) if self.num_output > 1 else None

    def met(self, slo: Slo) -> bool:
        return not self.refused and slo.met(self.ttft_s, self.tpot_s, self.e2e_s)


@dataclass(frozen=True)
class StackShape:
    """What a stack consists of: the workers of each role, and the resolved config of each role."""

    num_prefill: int
    num_decode: int
    prefill: EngineConfig
    decode: EngineConfig
    split: str = "auto"

    @property
    def words(self) -> str:
        return f"{self.num_prefill}:{self.num_decode}"


@dataclass(eq=False)
class VirtualWorker:
    """A worker: its engine, and when it is busy."""

    name: str
    role: str
    engine: Engine
    pace_estimator: PaceEstimator
    recent_load: RecentLoad = field(default_factory=RecentLoad)
    is_busy: bool = False
    busy_s: float = 0.0
    link_free_s: float = 0.0
    num_legs: int = 0
    waiting_tokens: int = 0


class VirtualStack:
    """A stack in virtual time: `run(entries)` serves all of them and returns them with their stamps."""

    def __init__(
        self, shape: StackShape, times: dict[str, StepTimes], slo: Slo = Slo(), concurrency: int | None = None
    ):
        """Make the stack. `times` by role. `slo`: of every request; empty: none. `concurrency`: of a closed loop, in
        which an entry arrives as another ends."""
        self.now = 0.0
        self._slo, self._split, self._concurrency = slo, shape.split, concurrency
        self._times = times
        host = times["decode"].efficiencies.host
        self._host, self._device = host, times["decode"].device
        self._events: list[tuple[float, int, Callable[[], None], QueueEntry | None]] = []
        self._order = itertools.count()
        self._queues = WaitingQueues(_MAX_WAITING, clock=lambda: self.now)
        fleet = self._fleet_rates = PaceEstimator()
        counts = {"prefill": shape.num_prefill, "decode": shape.num_decode}
        configs = {"prefill": shape.prefill, "decode": shape.decode}
        self.workers = [
            VirtualWorker(
                f"{role}{number}",
                role,
                virtual_engine(times[role].spec, configs[role], times[role]),
                PaceEstimator(fleet),
            )
            for role, count in counts.items()
            for number in range(count)
        ]
        self._named = {worker.name: worker for worker in self.workers}
        self._requests: dict[str, ServedRequest] = {}
        self._mean_output = _FIRST_GUESS
        self._waiting_entries: list[ServedRequest] = []
        self._gateway_s = 0.0  # core seconds that gateway and clients still have to work

    def run(self, entries: Sequence[TraceEntry]) -> list[ServedRequest]:
        requests = [ServedRequest(entry, number, span_names(entry, number)) for number, entry in enumerate(entries)]
        self._requests = {str(request.number): request for request in requests}
        if self._concurrency is None:
            for request in requests:
                self._at(request.entry.at_s, partial(self._arrive, request))
        else:
            self._waiting_entries = requests[: self._concurrency - 1 : -1]
            for request in requests[: self._concurrency]:
                self._at(0.0, partial(self._arrive, request))
        while self._events:
            when, _, event, waiting = heapq.heappop(self._events)
            if waiting is None or waiting.is_open:  # time does not advance for an entry that no longer waits
                self.now = when
                event()
        return requests

    def _at(self, when: float, event: Callable[[], None], waiting: QueueEntry | None = None) -> None:
        """Schedule `event` for this time; with `waiting`, only if that still waits then."""
        heapq.heappush(self._events, (when, next(self._order), event, waiting))

    # ---- the gateway ----

    def _arrive(self, request: ServedRequest) -> None:
        request.entry = replace(request.entry, at_s=self.now)
        try:
            alone_s = self._fleet_rates.pace(self.now).prefill_s(request.entry.num_prompt)
            self._queues.check(self._queued(request), alone_s)
        except Overloaded as error:
            self._refuse(request, error.reason)
            return
        self._at(self.now + self._host.request_s, lambda: self._admit(request))

    def _admit(self, request: ServedRequest) -> None:
        """Route the request, and ask the decode worker for credit; queue it if the worker refuses."""
        if not self._queues.credit.is_open_to("") and request.queue_entry is None:
            self._enqueue(self._queues.credit, request, lambda: self._admit(request))
            return
        decision = self._route(request)
        queued = self._queued(request)
        if request.queue_entry is None:
            try:
                queued.check(decision, self._queues.prefill.wait_s(queued))
            except Overloaded as error:
                self._refuse(request, error.reason)
                return
        taker = self._named[decision.decode]
        ask = self._engine_request(request)
        try:
            request.num_cached = taker.engine.admission.admit(ask)
        except Refusal as refusal:
            if refusal.reason == TOO_LONG:
                self._refuse(request, refusal.reason)
                return
            self._enqueue(self._queues.credit, request, lambda: self._admit(request))
            return
        self._dequeue(self._queues.credit, request)
        request.decision = decision
        taker.num_legs += 1
        taker.recent_load.add(decision.decode_s, self.now)
        if decision.prefill is None:
            taker.waiting_tokens += request.entry.num_prompt - request.num_cached
            taker.recent_load.add(decision.prefill_s, self.now)
            taker.engine.admission.compute_rest(ask.key)
            self._wake(taker)
        else:
            self._prefill(request)

    def _prefill(self, request: ServedRequest) -> None:
        assert request.decision is not None and request.decision.prefill is not None
        source = self._named[request.decision.prefill]
        try:
            accepted = source.engine.admission.accept(self._engine_request(request))
        except Refusal:
            self._enqueue(self._queues.prefill, request, lambda: self._prefill(request))
            return
        self._dequeue(self._queues.prefill, request)
        request.num_cached = accepted.num_cached_tokens
        source.num_legs += 1
        source.waiting_tokens += request.entry.num_prompt - request.num_cached
        source.recent_load.add(request.decision.prefill_s, self.now)
        self._wake(source)

    def _enqueue(self, queue: WaitingQueue, request: ServedRequest, retry: Callable[[], None]) -> None:
        if request.queue_entry is None:
            request.queue_entry = queue.join(
                self._queued(request), lambda: self._at(self.now, lambda: self._retry(request, retry))
            )
            entry = request.queue_entry
            self._at(self.now + entry.queued.max_wait_s, lambda: self._expire(queue, request, entry), entry)
        else:
            queue.call_next_tenant(request.queue_entry)

    def _retry(self, request: ServedRequest, retry: Callable[[], None]) -> None:
        if request.queue_entry is not None and request.queue_entry.is_open:
            retry()

    def _expire(self, queue: WaitingQueue, request: ServedRequest, entry: QueueEntry) -> None:
        """End a request that has waited as long as it may; one with credit returns it."""
        request.refused, request.queue_entry = "QUEUE_WAIT", None
        queue.leave(entry, served=False)
        if request.decision is None:
            self._next_in_loop()
            return
        taker = self._named[request.decision.decode]
        taker.engine.admission.cancel(Key(str(request.number)))
        self._wake(taker)

    def _dequeue(self, queue: WaitingQueue, request: ServedRequest) -> None:
        if (entry := request.queue_entry) is not None:
            request.queue_entry = None
            queue.leave(entry)

    def _refuse(self, request: ServedRequest, reason: str) -> None:
        request.refused = reason
        self._dequeue(self._queues.credit, request)
        self._next_in_loop()

    def _queued(self, request: ServedRequest) -> QueuedRequest:
        order = rank(request.entry.at_s, self._slo, 0)
        return QueuedRequest(order, request.entry.num_prompt, self._slo, tenant="", num_expected=self._mean_output)

    def _route(self, request: ServedRequest) -> Decision:
        entry = request.entry
        ask = RoutingRequest(entry.num_prompt, entry.num_prompt + entry.num_output, self._mean_output, self._slo)
        sides = {
            role: [self._candidate(worker, request.names, entry) for worker in self.workers if worker.role == role]
            for role in ("prefill", "decode")
        }
        return choose(ask, sides["prefill"], sides["decode"], self._split)

    def _candidate(self, worker: VirtualWorker, names: tuple[bytes, ...], entry: TraceEntry) -> Candidate:
        engine = worker.engine
        config, ledger = engine.config, engine.ledger
        assert config.max_model_len is not None
        num_matched = len(ledger.find(names, entry.num_prompt)) * config.block_size
        limits = WorkerLimits(config.max_model_len, engine.num_blocks, config.block_size)
        return Candidate(
            worker.name,
            num_matched,
            worker.num_legs,
            worker.waiting_tokens,
            limits,
            _WORDS,
            _WORDS,
            _TRANSPORTS,
            "host" if self._device.cores else worker.name,
            round(self._times[worker.role].kv_token_bytes),
            ledger.num_available * config.block_size,
            config.max_num_seqs,
            self._slo.tpot_s,
            worker.recent_load.utilization(self.now),
            worker.pace_estimator.pace(self.now),
        )

    def _engine_request(self, request: ServedRequest) -> Request:
        entry = request.entry
        num_output = max(1, entry.num_output)
        return Request(
            Key(str(request.number)),
            (1,) * entry.num_prompt,
            entry.num_prompt,
            SamplingParams(),
            num_output,
            span_hashes=request.names,
            chain_parent=request.names[-1] if request.names else bytes(HASH_BYTES),
        )

    # ---- workers ----

    def _wake(self, worker: VirtualWorker) -> None:
        """Begin a step if there is work and none runs. Its outputs are delivered at its end."""
        if worker.is_busy or not worker.engine.has_work():
            return
        outputs = worker.engine.step()
        if not worker.engine.has_computed:
            self._deliver(worker, outputs, 0.0)
            return
        launcher = worker.engine.runner.launcher
        assert isinstance(launcher, VirtualLauncher)
        worker.is_busy = True
        seconds = self._crowded_s(launcher.step_s)
        worker.busy_s += seconds
        self._at(self.now + seconds, lambda: self._end_step(worker, outputs, seconds))

    def _end_step(self, worker: VirtualWorker, outputs: list[Output], seconds: float) -> None:
        worker.is_busy = False
        self._deliver(worker, outputs, seconds)
        self._wake(worker)

    def _crowded_s(self, step_s: float) -> float:
        """Return how long a step takes if the processes of a host share its cores: all ranks that compute now, and
        gateway and clients, which use a free core, or else take equal parts from the others."""
        if (cores := self._device.cores) is None:
            return step_s
        busy = [worker for worker in self.workers if worker.is_busy]
        computing = sum((worker.engine.config.threads or 1) * self._times[worker.role].degree for worker in busy)
        alone, beside = max(1.0, computing / cores), max(1.0, (computing + 1) / cores)
        others_s, self._gateway_s = self._gateway_s, 0.0
        return alone * step_s + (beside - alone) * others_s

    def _deliver(self, worker: VirtualWorker, outputs: list[Output], step_s: float) -> None:
        num_tokens = 0
        for output in outputs:
            if isinstance(output, PrefillDone):
                self._end_prefill(worker, self._requests[output.key.request_id], output)
            elif isinstance(output, TokenRun):
                request = self._requests[output.key.request_id]
                request.num_output += len(output.token_ids)
                request.last_s = self.now + self._host.token_s
                num_tokens += len(output.token_ids)
            elif isinstance(output, RequestEnded):
                self._end(worker, self._requests[output.key.request_id])
        self._gateway_s += num_tokens * self._host.token_s
        if num_tokens:
            worker.pace_estimator.note_decode(worker.num_legs, step_s, self.now)

    def _end_prefill(self, worker: VirtualWorker, request: ServedRequest, done: PrefillDone) -> None:
        num_read = request.entry.num_prompt - request.num_cached
        worker.waiting_tokens -= num_read
        elsewhere_s = self._host.split_s if worker.role == "prefill" else 0.0
        request.first_s = request.last_s = self.now + self._host.token_s + elsewhere_s
        request.num_output = 1
        chunk = worker.engine.config.max_num_batched_tokens
        worker.pace_estimator.note_prefill(num_read, self._times[worker.role].prefill_s(num_read, chunk), self.now)
        self._queues.prefill.call_first()
        if worker.role == "decode":
            return
        worker.num_legs -= 1
        assert request.decision is not None
        taker = self._named[request.decision.decode]
        num_bytes = num_read * self._times["prefill"].kv_token_bytes
        # KV that moves while the prompt is read is hidden; the last chunk remains.
        left = min(num_bytes, worker.engine.config.max_num_batched_tokens * self._times["prefill"].kv_token_bytes)
        begin = max(self.now, worker.link_free_s, taker.link_free_s)
        worker.link_free_s = taker.link_free_s = begin + left / self._device.link_bytes_per_s
        self._at(worker.link_free_s + self._host.handover_s, lambda: self._adopt(worker, taker, request, done))

    def _adopt(self, source: VirtualWorker, taker: VirtualWorker, request: ServedRequest, done: PrefillDone) -> None:
        key, num_prompt = done.key, request.entry.num_prompt
        source.engine.admission.release_lease(key)
        going_on = tuple(first for first in done.first_tokens if first.finish_reason is None)
        admission = taker.engine.admission
        admission.skip(key, num_prompt)
        admission.set_aside(key, num_prompt)
        admission.verify(key, num_prompt)
        admission.fetch_settled(key)
        admission.start(key, going_on)
        self._wake(source)
        self._wake(taker)

    def _end(self, worker: VirtualWorker, request: ServedRequest) -> None:
        assert request.decision is not None
        if worker.name != request.decision.decode:
            return
        worker.num_legs -= 1
        if not request.refused:
            self._mean_output += _AVERAGE_WEIGHT * (request.num_output - self._mean_output)
        self._queues.credit.call_first()
        self._next_in_loop()

    def _next_in_loop(self) -> None:
        if self._waiting_entries:
            request = self._waiting_entries.pop()
            self._at(self.now, lambda: self._arrive(request))
