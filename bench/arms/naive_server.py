"""One rung of bench/ladder.py: an engine with some options, and how requests are submitted to it.

The rules of a naive server are made here and not in the engine: a batch begins when the previous one has ended
completely, and each request reserves room for the longest answer."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, PrefillDone, Refusal, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.loadgen.outcome import Outcome
from baton.loadgen.workload import Job
from baton.sampling_params import SamplingParams
from kvtransfer.naming import chain_hashes, root_hash

IDLE_S = 0.0005  # between two checks of the clock while no request has arrived


@dataclass(frozen=True)
class Technique:
    """Options of the engine, or rules of submitting, that one rung changes."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    rules: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """Rules of submitting. `continuous`: a request joins when there is room, not when the batch has ended. `paged`: it
    takes the room that it holds, not that of the longest answer. `named`: its spans have names, so prefixes are
    found."""

    continuous: bool = False
    paged: bool = False
    named: bool = False


@dataclass
class Ran:
    """One run. `kv_use`: bytes of KV that are computed and needed over those reserved, averaged over the steps; None if
    not measured."""

    outcomes: list[Outcome]
    kv_use: float | None

    @property
    def duration_s(self) -> float:
        return max(each.last_s for each in self.outcomes)

    @property
    def requests_per_s(self) -> float:
        return len(self.outcomes) / self.duration_s


class Rung:
    """One rung; `run(jobs)` may be called repeatedly."""

    def __init__(self, model: Path, base: dict[str, object], techniques: Sequence[Technique]):
        """Load the engine. `base`: options of the naive engine, which those of each technique override."""
        options, rules = dict(base), Rules()
        for technique in techniques:
            options |= technique.options
            rules = replace(rules, **technique.rules)
        self.rules = rules
        self.engine = Engine.load(EngineConfig(model=model, **options))
        self._places = self._num_places()
        self._request_ids = map(str, itertools.count())
        self._parent = root_hash(self.engine.model_identity)

    def run(self, jobs: Sequence[Job]) -> Ran:
        """Submit each job at its arrival, as soon as the rules admit it."""
        waiting, outcomes = deque(sorted(jobs, key=lambda job: job.at_s)), []
        running: dict[str, Outcome] = {}
        samples, batch = [], 0  # entries of the running batch
        begun = time.perf_counter()
        while waiting or running:
            now = time.perf_counter() - begun
            if self.rules.continuous or not running:
                batch = len(running)
                while waiting and waiting[0].at_s <= now and len(running) < self._places:
                    if (entered := self._enter(waiting[0])) is None:
                        break
                    job = waiting.popleft()
                    running[entered] = Outcome(job.index, job.at_s, job.num_prompt)
                    outcomes.append(running[entered])
                batch = max(batch, len(running))
            outputs = self.engine.step()
            now = time.perf_counter() - begun
            if self.engine.has_computed:
                samples.append(self._kv(len(running) if self.rules.continuous else batch))
            else:
                time.sleep(IDLE_S)
            for output in outputs:
                _note(output, running, now)
        live, held = (sum(column) for column in zip(*samples, strict=True))
        return Ran(outcomes, live / held)

    def _num_places(self) -> int:
        config = self.engine.config
        if self.rules.paged:
            return config.max_num_seqs
        return min(config.max_num_seqs, self.engine.num_blocks * config.block_size // config.max_model_len)

    def _enter(self, job: Job) -> str | None:
        """Submit a job; return its request id, or None if the pool has no room yet."""
        request_id = next(self._request_ids)
        hashes = chain_hashes(self._parent, job.token_ids) if self.rules.named else []
        request = Request(
            key=Key(request_id),
            token_ids=job.token_ids,
            num_prompt_tokens=len(job.token_ids),
            sampling=SamplingParams(),
            max_tokens=job.num_output,
            span_hashes=tuple(hashes),
            chain_parent=(hashes[-1] if hashes else self._parent) if self.rules.named else bytes(32),
        )
        try:
            self.engine.submit(request)
        except Refusal:
            return None
        return request_id

    def _kv(self, num_places: int) -> tuple[int, int]:
        """Return the tokens (live, reserved). A token that several requests share is live once."""
        engine, size = self.engine, self.engine.layout.block_size
        live: dict[int, int] = {}
        for group in engine.admission.groups.values():
            for seq in group.live:
                for index, block_id in enumerate(seq.blocks.ids):
                    computed = max(0, min(size, seq.num_computed - index * size))
                    live[block_id] = max(live.get(block_id, 0), computed)
        if not self.rules.paged:
            return sum(live.values()), num_places * engine.config.max_model_len
        holders = engine.ledger.counts()
        return sum(live.values()), (engine.num_blocks - holders["cached"] - holders["free"]) * size


def _note(output, running: dict[str, Outcome], now: float) -> None:
    outcome = running.get(output.key.request_id)
    if outcome is None:
        return
    if isinstance(output, PrefillDone):
        outcome.first_s = now
        outcome.num_cached = output.num_cached_tokens
        _add(outcome, (output.first_tokens[0].token_id,), now)
    elif isinstance(output, TokenRun):
        _add(outcome, output.token_ids, now)
    elif isinstance(output, RequestEnded):
        if output.error:
            raise RuntimeError(f"{output.key}: {output.error} {output.message}")
        del running[output.key.request_id]


def _add(outcome: Outcome, token_ids: Sequence[int], now: float) -> None:
    outcome.last_s = now
    outcome.token_ids.extend(token_ids)
    outcome.num_output += len(token_ids)
