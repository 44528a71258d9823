"""One engine: a model, its pool of KV, and the requests it serves.

any thread   admit set_aside verified fetch_settled   accept offer release_lease   cancel   at once   (admission.py)
any thread   submit start park resume                                                       posted    (inbox.py)
the loop     step: commands, schedule (scheduler.py), run (runner.py), results (collect.py)           (loop.py)
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.engine.core.config import EngineConfig
from baton.engine.core.device import scope
from baton.engine.core.model_spec import ModelSpec
from baton.engine.core.request import Acceptance, FirstToken, Key, LoadReport, Output, Request, RequestEnded, State
from baton.engine.execute.build import GpuMemoryFor, MemoryFor, load_parts
from baton.engine.execute.collect import Results
from baton.engine.execute.launcher import Launcher
from baton.engine.execute.runner import Flight, Runner, can_launch
from baton.engine.execute.throughput import Rate
from baton.engine.execute.watermark import layer_watermark
from baton.engine.kv.ledger import Ledger
from baton.engine.kv.pool import KVPool
from baton.engine.models.llama import Model
from baton.engine.models.loader import model_identity
from baton.engine.sampling.sampler import Sampler
from baton.engine.schedule.admission import Admission
from baton.engine.schedule.inbox import Command, Enter, Inbox, Park, Resume, Start, Stop
from baton.engine.schedule.scheduler import Scheduler, Slice
from baton.engine.schedule.sequence import Group
from baton.engine.schedule.step_work import StepWork
from baton.engine.speculation.control.speculator import Speculator, clock_for
from baton.engine.speculation.proposers.proposer import Proposer
from kvtransfer.layout import BlockRef, KVLayout, NumericsClass

logger = logging.getLogger(__name__)


class Engine:
    """See the module. `step` and `fail` belong to one thread, the loop's; everything else is thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        pool: KVPool,
        identity: bytes,
        sampler: Sampler,
        proposers: Sequence[Proposer] = (),
        launcher: Launcher | None = None,
    ):
        """`config` is resolved; `pool` has config.num_blocks blocks. Engine.load makes all of these from a folder."""
        self.config = config
        self.spec: ModelSpec = model.spec
        self.layout: KVLayout = pool.layout
        self.model_identity = identity
        self.attention_name: str = model.attention.name
        self.num_blocks = pool.num_blocks
        self.pool = pool
        self.ledger = Ledger(pool.num_blocks, pool.layout.block_size)
        self.inbox = Inbox()
        self.admission = Admission(config, pool.layout, self.ledger, self.inbox)
        self.scheduler = Scheduler(config, pool.layout, self.ledger, self.admission)
        self.runner = Runner(model, pool, sampler, launcher)
        self.results = Results(self.scheduler, self.admission, self.runner)
        self.speculator = Speculator(proposers, self.scheduler, config.num_draft_tokens, clock_for(pool.device))
        self.on_progress: Callable[[list[Output]], None] = lambda outputs: None  # in mid-step; the loop sets it
        self.step_number = 0
        self.launched = False  # the last step computed something
        self.last_batch_size = 0  # sequences of the last step
        self._outputs: list[Output] = []  # of the call of `step` that runs
        self._computing: list[Slice] = []  # by it, and not collected yet
        self._flight: Flight | None = None  # a step that was launched and not read
        self.work = StepWork()
        self._rate = Rate()
        self._stepping = threading.Lock()

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        memory_for: MemoryFor | None = None,
        gpu_memory_for: GpuMemoryFor | None = None,
        proposers: Sequence[Proposer] | None = None,
    ) -> "Engine":
        """Reads the model folder and sizes the pool. `memory_for(num_bytes)` gives the pool's memory on a CPU,
        `gpu_memory_for(num_bytes, device)` on a GPU; without them torch allocates. `proposers`: in place of those that
        the config names. Raises ModelError (names the file), ValueError
        (names the option)."""
        parts = load_parts(
            config, memory_for, gpu_memory_for, None if proposers is None else lambda config, model: proposers
        )
        return cls(parts.config, parts.model, parts.pool, model_identity(config.model), *parts[3:])

    @property
    def numerics_class(self) -> NumericsClass:
        """What KV of this engine may feed: the kernels are part of it, each adds in an order of its own."""
        return NumericsClass(
            identity=self.model_identity.hex(),
            weights=self.weight_form,
            compute=self.config.dtype,
            kv_form=self.config.kv_dtype,
            batch_invariant=self.config.batch_invariant,
            extra=self.runner.model.numerics,
        )

    @property
    def weight_form(self) -> str:
        """Short names of the forms of its linear weights."""
        return self.runner.model.weights.form

    @property
    def start_line(self) -> str:
        """What was chosen and why, in one line."""
        weights = self.runner.model.weights
        chosen = {"attention": self.attention_name, "linear": "+".join(weights.kernels)}
        chosen["layers"] = self.runner.model.layers_name
        reasons = {
            kind: ", ".join(f"not {other}: {why}" for other, why in passed_over.items())
            for kind, passed_over in self.runner.model.reasons.items()
        }
        backends = "; ".join(f"{kind} {name} ({reasons[kind]})" for kind, name in chosen.items())
        mebibytes = self.num_blocks * self.layout.block_bytes / (1 << 20)
        return (
            f"model {self.spec.name} {self.spec.family} {self.runner.launcher.words}, weights {weights}, {self.config.dtype}, "
            f"kv {self.config.kv_dtype}, context {self.config.max_model_len}, {self.num_blocks} blocks of {self.layout.block_size} tokens "
            f"({mebibytes:.0f} MiB); {backends}{self.speculator.start_words}"
        )

    # ---- answered at once ----

    def admit(self, request: Request) -> int:
        """Credit on a decode worker: the number of cached tokens; raises Refusal."""
        return self.admission.admit(request)

    def accept(self, request: Request, fetches: bool = False) -> Acceptance:
        """A held prefill: its blocks, all of them; one that `fetches` a prefix waits for compute_rest. Raises Refusal."""
        return self.admission.accept(request, fetches)

    def fetching(self, key: Key) -> None:
        """Bytes may land in a held prefill's blocks, until fetch_settled. LookupError when the key has ended."""
        self.admission.fetching(key)

    def compute_rest(self, key: Key) -> None:
        """What of a prompt was not fetched is computed here. LookupError when the key has ended; raises Refusal."""
        self.admission.compute_rest(key)

    def offer(self, key: Key, span_hashes: tuple[bytes, ...]) -> Acceptance:
        """A lease on what is cached of these spans; ended by release_lease(key). No blocks: nothing is here."""
        return self.admission.offer(key, span_hashes)

    def set_aside(self, key: Key, upto_token: int) -> list[BlockRef]:
        """Destination blocks for tokens [0, upto_token) of an admitted key. LookupError when the key has ended."""
        return self.admission.set_aside(key, upto_token)

    def verified(self, key: Key, upto_token: int) -> None:
        """Tokens [0, upto_token) have arrived and are confirmed. LookupError when the key has ended."""
        self.admission.verified(key, upto_token)

    def fetch_settled(self, key: Key) -> None:
        """No byte of the key's fetch can land any more. Idempotent."""
        self.admission.fetch_settled(key)
        self.inbox.ring()

    def cancel(self, key: Key) -> None:
        """Ends a key in any state, once. Idempotent."""
        self.admission.cancel(key)

    def release_lease(self, key: Key) -> None:
        """Ends a held prefill or an offer. Idempotent."""
        self.admission.release_lease(key)

    def generation(self, block_id: int) -> int:
        return self.ledger.generation(block_id)

    def block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Span hashes (sealed, evicted) since the last call, net."""
        return self.ledger.block_events()

    def snapshot(self) -> list[bytes]:
        """All cached span hashes."""
        return self.ledger.snapshot()

    def load_report(self) -> LoadReport:
        return LoadReport(
            step=self.step_number,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_waiting_tokens=self.admission.num_waiting_tokens,
            num_blocks_total=self.num_blocks,
            blocks_by_holder=self.ledger.counts(),
            tokens_per_s=self._rate.per_s(),
            num_draft_tokens=sum(sum(counts.proposed) for counts in self.speculator.counts.values()),
            num_accepted_tokens=sum(sum(counts.accepted) for counts in self.speculator.counts.values()),
        )

    def check_integrity(self) -> None:
        """AssertionError unless every block is held by exactly those who say so. Waits for the step in flight."""
        with self._stepping, self.ledger.lock:
            self.ledger.check_integrity()
            self.ledger.check_holders(self.admission.holdings())
            assert self.ledger.num_reserved == self.admission.num_promised()

    # ---- posted to the loop ----

    def submit(self, request: Request) -> None:
        """Prefill and decode here, from the first token; raises Refusal."""
        self.admission.submit(request)

    def start(self, key: Key, first_tokens: tuple[FirstToken, ...]) -> None:
        """A fetched prompt joins the batch; choices that are missing have finished with their first token."""
        self.admission.start(key, first_tokens)

    def park(self, key: Key) -> None:
        """A decoding key stops before the next step and holds no block any more; its token record stays. Idempotent."""
        self.admission.park(key)

    def resume(self, key: Key, deadline: float = float("inf")) -> None:
        """A parked key goes on by a prefix hit, until `deadline` (time.monotonic()). LookupError when it has ended."""
        self.admission.resume(key, deadline)

    # ---- the loop's ----

    def has_work(self) -> bool:
        return bool(self.inbox) or self._flight is not None or self.scheduler.has_work()

    def step(self) -> list[Output]:
        """One step: all that it gives out. Where the launcher overlaps, a decode step is only launched, and read by the
        next call, behind the launch of its successor if nothing else is to be done; else nothing is in flight when
        commands are obeyed and the next step is chosen, so all that gives blocks back comes after what touches them."""
        with self._stepping, self.runner.launcher.place():
            self._outputs, self._computing = [], []
            now = time.monotonic()
            if self._flight is not None:
                with self.ledger.lock:
                    is_due = self.admission.groups.is_due(now)
                self._land(self._flight, goes_on=not (self.inbox or is_due))
                if self._flight is not None:
                    return self._outputs
            for command in self.inbox.drain():
                self._obey(command)
            self._end_expired(now)
            slices = self.scheduler.schedule()
            self.launched, self.last_batch_size = bool(slices), len(slices)
            if not slices:
                self.speculator.close_all()
                return self._outputs
            self._computing = slices
            if self._overlaps and can_launch(slices):
                self._flight = self.runner.launch(slices)
            else:
                self._launch(slices)
            return self._outputs

    def fail(self, message: str) -> list[Output]:
        """After a step that raised: what it gave out before it did, and the keys that it computed end, `failed` where
        there was one, `failed_together` where there were several. Where it raised over none of them every key ends.
        Their blocks come back, the engine goes on."""
        with self._stepping:
            with suppress(Exception):  # the device is lost: then nothing computes there either
                self.runner.launcher.wait()
            computing = self._computing + (self._flight.slices if self._flight is not None else [])
            self._flight = None
            self.results.forget()
            groups = list(dict.fromkeys(piece.seq.group for piece in computing))
            with self.ledger.lock:
                groups = groups or list(self.admission.groups.values())
            for group in groups:
                self._end(group, "failed" if len(groups) == 1 else "failed_together", message)
            return self._outputs

    @property
    def _overlaps(self) -> bool:
        """Proposals need the tokens before them."""
        return self.runner.launcher.overlaps and not self.speculator.proposers

    def _land(self, flight: Flight, goes_on: bool) -> None:
        """Reads a flight, behind the launch of the next one where it `goes_on` and there is one."""
        self._flight, aloft, self._computing = None, frozenset(), flight.slices
        if goes_on and (following := self.scheduler.follow(flight.slices)):
            self._flight = self.runner.launch(following, flight)
            aloft = frozenset(piece.seq for piece in following)
            self.last_batch_size = len(following)
        drawn = self.runner.read(flight)
        self.step_number += 1
        self.work.add(flight.slices)
        self.results.collect(flight.slices, drawn, flight.launched_at, self._outputs, aloft)
        self._rate.add(len(drawn))
        self._computing = []

    def _launch(self, slices: list[Slice]) -> None:
        launched_at = time.monotonic()
        for seq, _, _ in slices:
            if seq.group.launched_at is None and not seq.group.prefilled:
                self.admission.launched(seq.group, launched_at)
        num_tokens = sum(end - begin for _, begin, end in slices)
        with scope(self.pool.device):
            self.speculator.draft(slices, self.config.max_num_batched_tokens - num_tokens)
        self.runner.keeps_hidden = self.speculator.wants_hidden
        drawn = self.runner.run(slices, layer_watermark(slices, self.on_progress))
        self.step_number += 1
        self.work.add(slices)
        self.speculator.measure(drawn)
        self.results.collect(slices, drawn, launched_at, self._outputs)
        with scope(self.pool.device):
            self.speculator.advance(drawn, self.runner.hidden)
        self._rate.add(sum(len(samples) for _, samples in drawn))

    def _obey(self, command: Command) -> None:
        """What fails here is the fault of one key, and ends that."""
        if isinstance(command, RequestEnded):
            self._outputs.append(command)
            return
        group = self.admission.groups.find(command.key, command.arrival)
        if group is None or not (group.in_loop or isinstance(command, (Stop, Resume))):
            return
        try:
            self._obey_for(group, command)
        except Exception as error:
            logger.exception("%s failed for %s", type(command).__name__, command.key)
            self._end(group, "failed", f"{type(command).__name__} failed: {type(error).__name__}: {error}")

    def _obey_for(self, group: Group, command: Command) -> None:
        """`group` is the loop's, except for Stop and Resume: then another thread may end it at any time."""
        match command:
            case Enter():
                self.scheduler.add(group.trunk)
            case Start():
                self._start(group, command.first_tokens)
            case Stop():
                self._end(group, "cancelled")
            case Park():
                self._park(group)
            case Resume():
                self._resume(group)

    def _start(self, group: Group, first_tokens: tuple[FirstToken, ...]) -> None:
        if not first_tokens:
            self._end(group)
            return
        group.state = State.RUNNING
        self.scheduler.fork(group.trunk, list(first_tokens), self.runner.copy_block)
        self.scheduler.add(group.trunk)

    def _park(self, group: Group) -> None:
        """Only what decodes: a prompt that is being read has nothing yet that somebody could go on with."""
        if group.prefilled and group.state is State.RUNNING:  # not before its Start was obeyed
            for seq in group.live:
                self.scheduler.remove(seq)
            self.admission.parked(group)

    def _resume(self, group: Group) -> None:
        if self.admission.resumed(group):
            for seq in group.live:
                self.scheduler.add(seq)

    def _end_expired(self, now: float) -> None:
        while True:
            with self.ledger.lock:
                group = self.admission.groups.pop_expired(now)
                if group is None:
                    return
                self._end(group, "deadline", "the deadline has passed")

    def _end(self, group: Group, error: str = "", message: str = "") -> None:
        """Nothing where it has ended already."""
        with self.ledger.lock:
            if group.in_loop:
                for seq in group.live:
                    self.scheduler.remove(seq)
            ended = self.admission.end(group, error, message)
        if ended is not None:
            self._outputs.append(ended)
