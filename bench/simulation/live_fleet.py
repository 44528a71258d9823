"""The fleet of fleet.py behind many gateways, while nodes die, Redis fails over, a rollout fails, and workers come and
go.

Each gateway runs its own admission, queues and breakers, unchanged. It knows what workers reported up to LOAD_GAP_S ago
and what it has sent them since; learned rates are shared. Modelled in addition to fleet.py: workers that die, whose
requests continue elsewhere once that is noticed; a version that fails every request; an index that is lost and comes
back empty; workers that are added and drained. Not modelled: the network between gateways and workers."""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from baton.loadgen.trace import TraceEntry
from baton.service.errors import Overloaded
from baton.service.slo import Slo
from baton.worker.observe.reports import LOAD_GAP_S
from bench.simulation.fleet import DecodeWorker, Fleet, Machine, PrefillWorker, Worker
from bench.simulation.simulated_gateway import LoadReport, SimulatedGateway
from bench.simulation.simulated_request import Asked, Attempt
from gateway.fleet.candidates import NUM_SEEN
from gateway.prefix.prefix_matches import Matches, WorkerBits
from gateway.queue.quotas import Reservation
from gateway.queue.waiting_queue import QueuedRequest, QueueEntry, rank
from gateway.routing.routing import Candidate, RoutingRequest, choose, shortlist

NOTICED_S = 2.0  # until a dead worker's silence is noticed
FAILED_S = 0.05  # until a worker of the bad version has failed a request
ANNOUNCE_S = 10.0  # in which all workers have told a new Redis what they hold
RETRY_S, ASK_S = 0.25, 0.01


class LiveFleet(Fleet):
    """A fleet with faults: schedule them, then call `serve(entries)`."""

    def __init__(self, num_workers: int, num_gateways: int, machine: Machine, slo: Slo, prefill_share: float = 0.5):
        super().__init__(num_workers, machine, "auto", slo, prefill_share)
        self.now = 0.0
        self.gateways = [SimulatedGateway(number, lambda: self.now) for number in range(num_gateways)]
        self._waiting_at: set[SimulatedGateway] = set()
        self._attempts: dict[str, set[Attempt]] = defaultdict(set)
        self._reports: dict[str, LoadReport] = {}
        self.dead: set[str] = set()
        self._bad: set[str] = set()
        self._numbers = itertools.count(num_workers)
        self._index_is_down = False
        self._came: list[Asked] = []  # see take_recent
        self._ended: list[Asked] = []
        self.num_failures = Counter[str]()  # failed attempts, by cause
        self._num_open, self._asked_s = 0, 0.0
        self._reservations: dict[int, Reservation] = {}

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    # ---- faults and changes ----

    def serve(self, entries: Sequence[TraceEntry]) -> list[Asked]:
        """Serve all requests, each through a random gateway."""
        asked = [Asked(entry, number, self._rng.randrange(len(self.gateways))) for number, entry in enumerate(entries)]
        self._num_open = len(asked)
        arrivals = iter(asked)

        def arrive(now: float, one: Asked) -> None:
            self._arrive_next(arrivals, arrive)
            self._arrive(one)

        self._arrive_next(arrivals, arrive)
        while self._events and self._num_open:
            self.now, _, event = heapq.heappop(self._events)
            event(self.now)
        return asked

    def _arrive_next(self, arrivals, arrive) -> None:
        if (one := next(arrivals, None)) is not None:
            self.at(one.entry.at_s, lambda now: arrive(now, one))

    def kill_at(self, at_s: float, num: int) -> None:
        """Kill `num` workers at this time, with everything that runs there."""
        self.at(at_s, lambda now: [self._die(worker) for worker in self._rng.sample(self.workers, num)])

    def lose_redis_at(self, at_s: float, for_s: float) -> None:
        """Lose the index, which comes back empty."""
        self.at(at_s, lambda now: setattr(self, "_index_is_down", True))
        self.at(at_s + for_s, lambda now: self._redis_is_back())

    def roll_out_at(self, at_s: float, num: int, until_s: float) -> None:
        """Replace `num` workers by a version that fails every request, until it is rolled back."""

        def begin(now: float) -> None:
            self._bad = {worker.name for worker in self._rng.sample(self.workers, num)}

        self.at(at_s, begin)
        self.at(until_s, lambda now: self._bad.clear())

    def add(self, role: str, num: int) -> None:
        """Add `num` workers of a role, which serve from now on."""
        kind, workers = (PrefillWorker, self.prefill) if role == "prefill" else (DecodeWorker, self.decode)
        for _ in range(num):
            number = next(self._numbers)
            worker = kind(number, f"{role[0]}{number:04}", self._machine, self._index, self._pace_estimator)
            workers.append(worker)
            self.workers.append(worker)
            self._named[worker.name] = worker
            if isinstance(worker, DecodeWorker):
                worker.at_s = self.now
        self._place()
        self._serve_waiting(self.now)

    def drain(self, role: str, num: int) -> None:
        """Drain the least loaded workers; what runs there ends there."""
        workers = sorted(getattr(self, role), key=lambda worker: worker.num_sequences + worker.num_waiting_tokens)
        for worker in workers[:num]:
            self._remove(worker)

    def take_recent(self) -> tuple[list[Asked], list[Asked]]:
        """Return the requests that came, and those that ended, since the last call."""
        taken = self._came, self._ended
        self._came, self._ended = [], []
        return taken

    # ---- a gateway ----

    def _arrive(self, one: Asked) -> None:
        gateway = self.gateways[one.gateway]
        self._came.append(one)
        self._reservations[one.number] = gateway.admission.enter(str(one.number), "")
        try:
            alone_s = self._pace_estimator.pace(self.now).prefill_s(one.entry.num_prompt)
            gateway.queues.check(self._queued(one), alone_s)
        except Overloaded as error:
            one.refused = error.reason
            self._finish(one)
            return
        self._try(one)

    def _try(self, one: Asked) -> None:
        """Route and send a request; queue it in the gateway if the chosen worker is full."""
        gateway, entry = self.gateways[one.gateway], one.entry
        is_waiting = one.queue_entry is not None
        if not is_waiting and not gateway.queues.credit.is_open_to(""):
            self._wait(gateway, one)
            return
        left = TraceEntry(
            self.now, entry.num_prompt + one.num_done, max(1, entry.num_output - one.num_done), entry.hash_ids
        )
        attempt = Attempt(left, self.now, one.number, asked=one)
        decision = attempt.decision = self._route_by(gateway, attempt)
        if not is_waiting and not one.num_attempts:
            try:
                self._queued(one).check(decision, gateway.queues.prefill.wait_s(self._queued(one)))
            except Overloaded as error:
                one.refused = error.reason
                self._finish(one)
                return
        taker = self._named[decision.decode]
        if taker.num_sequences >= self._machine.max_sequences and decision.decode not in self.dead | self._bad:
            self._wait(gateway, one)
            return
        self._leave(gateway, one)
        self._send(gateway, attempt)

    def _send(self, gateway: SimulatedGateway, attempt: Attempt) -> None:
        one, decision = attempt.asked, attempt.decision
        one.num_attempts += 1
        names = attempt.names = tuple(name for name in (decision.prefill, decision.decode) if name)
        if failing := [name for name in names if name in self.dead or name in self._bad]:
            took_s = NOTICED_S if failing[0] in self.dead else FAILED_S
            self.at(self.now + took_s, lambda now: self._failed(gateway, attempt, failing[0]))
            return
        for name in names:
            self._attempts[name].add(attempt)
            at_s = self._reports[name].at_s if name in self._reports else self.now
            gateway.count_sent(name, at_s, attempt.entry.num_prompt)
        taker = self._named[decision.decode]
        taker.num_sequences += 1
        taker.recent_load.add(decision.decode_s, self.now)
        attempt.is_local = decision.is_local
        if decision.is_local:
            self._read_here(attempt, taker, self.now)
        else:
            self._read_there(attempt, self._named[decision.prefill], taker, self.now)

    def _failed(self, gateway: SimulatedGateway, attempt: Attempt, name: str) -> None:
        gateway.breaker(name).note_failure(self.now)
        self.num_failures["rollout" if name in self._bad else "death"] += 1
        self._try(attempt.asked)

    def _wait(self, gateway: SimulatedGateway, one: Asked) -> None:
        self._waiting_at.add(gateway)
        if one.queue_entry is None:
            one.queue_entry = gateway.queues.credit.join(
                self._queued(one), lambda: self.at(self.now + 0.001, lambda now: self._retry(one))
            )
            self.at(
                self.now + QueuedRequest(0.0).max_wait_s, lambda now, entry=one.queue_entry: self._time_out(one, entry)
            )
        else:
            gateway.queues.credit.call_next_tenant(one.queue_entry)
        if not gateway.has_timer:
            gateway.has_timer = True
            self.at(self.now + RETRY_S, lambda now: self._call_first(gateway))

    def _call_first(self, gateway: SimulatedGateway) -> None:
        gateway.has_timer = False
        gateway.queues.credit.call_first()

    def _retry(self, one: Asked) -> None:
        if one.queue_entry is not None and one.queue_entry.is_open:
            self._try(one)

    def _time_out(self, one: Asked, entry: QueueEntry) -> None:
        """End a request that has waited as long as it may."""
        if entry.is_open:
            one.refused = "QUEUE_WAIT"
            self._finish(one)

    def _leave(self, gateway: SimulatedGateway, one: Asked) -> None:
        if one.queue_entry is not None:
            entry, one.queue_entry = one.queue_entry, None
            gateway.queues.credit.leave(entry)
            if not len(gateway.queues):
                self._waiting_at.discard(gateway)

    def _queued(self, one: Asked) -> QueuedRequest:
        order = rank(one.entry.at_s, self._slo, 0)
        return QueuedRequest(order, one.entry.num_prompt, self._slo, tenant="", num_expected=self._mean_output)

    def _finish(self, one: Asked) -> None:
        gateway = self.gateways[one.gateway]
        self._leave(gateway, one)
        gateway.admission.leave(str(one.number), self._reservations.pop(one.number), 0)
        self._ended.append(one)
        self._num_open -= 1

    def _serve_waiting(self, now: float) -> None:
        """Retry waiting requests, since a worker may have room, but not at every step of every worker."""
        if self._waiting_at and now - self._asked_s >= ASK_S:
            self._asked_s = now
            for gateway in sorted(self._waiting_at, key=lambda gateway: gateway.number):
                gateway.queues.credit.call_first()

    # ---- what a gateway knows ----

    def _route_by(self, gateway: SimulatedGateway, attempt: Attempt):
        entry = attempt.entry
        matches = Matches() if self._index_is_down else self._index.lookup(entry.hash_ids)

        def side(workers: list, kind: type) -> list[Candidate]:
            holders = (worker for worker in itertools.islice(matches, NUM_SEEN) if isinstance(worker, kind))
            usable = (
                shortlist(holders, workers, lambda worker: gateway.takes(worker.name, self.now), self._rng)
                or workers[:1]
            )
            return [self._seen(gateway, worker, worker.in_tokens(matches.get(worker), entry)) for worker in usable]

        ask = RoutingRequest(entry.num_prompt, entry.num_prompt + 1, self._mean_output, self._slo)
        return choose(ask, side(self.prefill, PrefillWorker), side(self.decode, DecodeWorker), self._split)

    def _seen(self, gateway: SimulatedGateway, worker: Worker, num_matched: int) -> Candidate:
        num_sequences, num_tokens = gateway.load_of(worker.name, self._report(worker))
        return worker.candidate(num_matched, self.now)._replace(
            num_sequences=num_sequences, num_waiting_tokens=num_tokens
        )

    def _report(self, worker: Worker) -> LoadReport:
        found = self._reports.get(worker.name)
        if found is None or self.now - found.at_s >= LOAD_GAP_S:
            found = LoadReport(self.now, worker.num_sequences, worker.num_waiting_tokens)
            self._reports[worker.name] = found
        return found

    # ---- a worker ----

    def _join(self, request: Attempt, worker: DecodeWorker, now: float) -> None:
        if not request.is_dead:
            super()._join(request, worker, now)

    def _end(self, request: Attempt, worker: DecodeWorker, now: float) -> None:
        if request.is_dead:
            return
        super()._end(request, worker, now)
        one = request.asked
        self._forget(request)
        one.first_s = one.first_s or request.first_s
        one.num_cached = request.num_cached
        one.last_s, one.num_done = max(now, one.first_s), one.entry.num_output
        for name in request.names:
            if (breaker := self.gateways[one.gateway].breakers.get(name)) is not None:
                breaker.note_success(request.at_s)
        self._finish(one)

    def _forget(self, attempt: Attempt) -> None:
        for name in attempt.names:
            self._attempts[name].discard(attempt)

    def _die(self, worker: Worker) -> None:
        self.dead.add(worker.name)
        worker.keep = lambda hash_ids: None  # nothing is cached there any more
        if isinstance(worker, DecodeWorker):
            worker.advance(self.now)
            left = {request: steps - worker.steps for steps, _, request in worker.ends}
            worker.version += 1  # so that its next event is ignored
        else:
            left = {}
            worker.queue.clear()
        lost = sorted(self._attempts.pop(worker.name, ()), key=lambda attempt: attempt.number)
        for attempt in lost:
            attempt.is_dead = True
            self._give_back(attempt, worker)
            one = attempt.asked
            if attempt.first_s and attempt.first_s <= self.now:
                one.first_s = one.first_s or attempt.first_s
                done = attempt.entry.num_output - math.ceil(left.get(attempt, attempt.entry.num_output - 1))
                one.num_done = min(one.num_done + max(1, done), one.entry.num_output - 1)
        self.at(self.now + NOTICED_S, lambda now: self._notice(worker, lost))

    def _give_back(self, attempt: Attempt, dead: Worker) -> None:
        """Free what the attempt holds on the surviving worker."""
        self._forget(attempt)
        for name in attempt.names:
            worker = self._named[name]
            if worker is dead or name in self.dead:
                continue
            if isinstance(worker, DecodeWorker):
                worker.num_sequences -= 1
                worker.advance(self.now)
                worker.ends = [entry for entry in worker.ends if entry[2] is not attempt]
                heapq.heapify(worker.ends)
                self._plan(worker, self.now)

    def _notice(self, worker: Worker, lost: Sequence[Attempt]) -> None:
        self._remove(worker)
        for attempt in lost:
            self.num_failures["death"] += 1
            self._try(attempt.asked)

    def _remove(self, worker: Worker) -> None:
        """Route no more requests to the worker."""
        for workers in (self.prefill, self.decode, self.workers):
            if worker in workers:
                workers.remove(worker)
        self._place()

    def _place(self) -> None:
        self._index.worker_bits = WorkerBits.of({worker.number: worker for worker in self.workers})

    def _redis_is_back(self) -> None:
        self._index_is_down = False
        self._index.clear()
        for worker in self.workers:
            self.at(self.now + self._rng.uniform(0, ANNOUNCE_S), lambda now, worker=worker: worker.announce())


def met_between(asked: Sequence[Asked], slo: Slo, begin_s: float, end_s: float) -> float:
    """Return the share of requests of this time that met the SLO; nan for no requests."""
    found = [one.met(slo) for one in asked if begin_s <= one.entry.at_s < end_s]
    return sum(found) / len(found) if found else math.nan
