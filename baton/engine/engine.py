"""One engine: a model, its pool of KV, and the requests it serves.

any thread   submit, cancel; engine.admission: credit, fetches, leases, parking     never waits   (admission.py)
any thread   engine.ledger: counts and names of blocks                              never waits   (kv/ledger.py)
the loop     step: commands, schedule (scheduler.py), run (runner.py), outputs (output_processor.py)  (loop.py)
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path

from baton import failpoints
from baton.engine.adapters.adapters import Adapters
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.core.model_spec import ModelSpec
from baton.engine.core.request import FirstToken, Key, LoadReport, Output, Refusal, Request, RequestEnded
from baton.engine.execute.build import GpuMemoryFor, MemoryFor, make_ledger
from baton.engine.execute.launcher import Launcher
from baton.engine.execute.multi_step import MAX_STEPS, MultiStep, compute
from baton.engine.execute.output_processor import OutputProcessor
from baton.engine.execute.runner import Flight, Runner
from baton.engine.execute.watermark import layer_watermark
from baton.engine.kv.pool import KVPool
from baton.engine.loading import load
from baton.engine.models.decoder import Model
from baton.engine.models.loader import model_identity
from baton.engine.models.registry import read_spec
from baton.engine.ranks.spawn import Joining, Ranks
from baton.engine.sampling.grammars import Grammars, read_grammars
from baton.engine.sampling.sampler import Sampler
from baton.engine.schedule.admission import Admission
from baton.engine.schedule.counters import OutputLengths
from baton.engine.schedule.group_actions import Ending
from baton.engine.schedule.groups import Groups
from baton.engine.schedule.inbox import Command, Enter, GroupCommand, Inbox, Park, PendingCommands, Resume, Start, Stop
from baton.engine.schedule.lifecycle import GroupLifecycle
from baton.engine.schedule.scheduler import Scheduler
from baton.engine.schedule.sequence import Copies, SequenceGroup
from baton.engine.schedule.states import GroupEvent
from baton.engine.schedule.steps import Slice
from baton.engine.schedule.tenant_shares import Shares
from baton.engine.speculation.control.speculator import Speculator, clock_for
from baton.engine.speculation.proposers.proposer import Proposer
from baton.engine.step_work import Rate, StepWork
from kvtransfer.layout import KVLayout, NumericsClass

logger = logging.getLogger(__name__)


class Engine:
    """One model that serves requests. `step` and `fail` belong to the loop's thread; everything else is thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        pool: KVPool,
        identity: bytes,
        sampler: Sampler,
        proposers: Sequence[Proposer] = (),
        launcher: Launcher | None = None,
        ranks: Ranks | None = None,
        grammars: Grammars | None = None,
    ):
        """Take the parts that `load` makes. `config` is resolved; `pool` may have more ids than whole blocks."""
        self.config = config
        self.spec: ModelSpec = model.spec
        self.layout: KVLayout = pool.layout
        self.model_identity = identity
        self.attention_name: str = model.attention.name
        self.pool, self.ledger = pool, make_ledger(config, model, pool)
        self.num_blocks = self.ledger.num_blocks
        self.inbox = Inbox()
        groups, lengths = Groups(), OutputLengths()
        shares = Shares(config, pool.layout, self.ledger, groups)
        self.runner = Runner(model, pool, sampler, launcher)
        copies = Copies(self.runner.copy_block, self.runner.copy_state)
        self.scheduler = Scheduler(config, pool.layout, self.ledger, shares, lengths, copies)
        self.lifecycle = GroupLifecycle(pool.layout, self.ledger, self.inbox, groups, self.scheduler, grammars)
        self.grammars = grammars  # None: requests with a constraint are refused
        self.adapters = Adapters(model, config.adapter_slots)
        self.admission = Admission(config, pool.layout, self.lifecycle, shares, self.adapters)
        self.ranks = ranks  # the other processes of the engine, if any
        self._multi_step = None if ranks else MultiStep.of(self.runner, self.inbox.address)
        self.output_processor = OutputProcessor(self.scheduler, self.lifecycle, self.runner)
        max_steps = MAX_STEPS if self._multi_step else 1
        clock, num_draft_tokens = clock_for(pool.device), config.num_draft_tokens
        self.speculator = Speculator(proposers, self.scheduler, num_draft_tokens, clock, max_steps)
        self.on_progress: Callable[[list[Output]], None] = lambda outputs: None  # called in mid-step; set by the loop
        self.step_number = 0
        self.has_computed = False  # whether the last step computed or launched anything
        self.last_batch_size = 0  # sequences of the last step
        self._outputs: list[Output] = []  # of the running call of `step`
        self._computing: list[Slice] = []  # slices that are being computed and not collected yet
        self._flights: deque[Flight] = deque()  # launched steps that were not read yet, oldest first
        self._deferred: deque[Command] = deque()  # commands for keys in flight
        self._pending = PendingCommands(self.inbox.ring)
        self.work = StepWork()
        self._rate = Rate()
        self._stepping = threading.Lock()

    @classmethod
    def load(
        cls, config: EngineConfig, memory_for: MemoryFor | None = None, gpu_memory_for: GpuMemoryFor | None = None,
        proposers: Sequence[Proposer] | None = None, joining: Joining | None = None, rank_program: str | None = None,
    ) -> "Engine":  # fmt: skip
        """Load the model and size the pool. `memory_for(num_bytes)` returns the pool's memory on a CPU,
        `gpu_memory_for(num_bytes, device)` on a GPU; by default torch allocates it. `proposers` replace those that the
        config names. `joining` is where ranks of other hosts join, `rank_program` the module that other ranks on GPUs
        run. Raises ModelError (names the file), ValueError (names the option)."""
        vocab_size = read_spec(config.model).vocab_size
        with ThreadPoolExecutor(1, "vocabulary") as thread:  # 1.2 s for 131,072 tokens, beside the weights
            reading = thread.submit(read_grammars, config.model, vocab_size)
            identity = model_identity(config.model)
            make = None if proposers is None else lambda config, model: proposers
            parts = load(config, identity, memory_for, gpu_memory_for, make, joining, rank_program)
        try:
            engine = cls(
                parts.config,
                parts.model,
                parts.pool,
                identity,
                parts.sampler,
                proposers=parts.proposers,
                launcher=parts.launcher,
                ranks=parts.ranks,
                grammars=reading.result(),
            )
            for name, folder in config.adapter_folders.items():
                engine.add_adapter(name, folder)
        except BaseException:
            if parts.ranks is not None:
                parts.ranks.close()
            raise
        return engine

    @property
    def numerics_class(self) -> NumericsClass:
        """The class of engines that may exchange KV. Kernels are part of it: each adds in an order of its own."""
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
        """The short names of the forms of its linear weights."""
        return self.runner.model.weights.form

    @property
    def model_name(self) -> str:
        """The name for clients, metrics and traces."""
        return self.config.served_model_name or self.spec.name

    def add_adapter(self, name: str, folder: Path) -> bytes:
        """Read an adapter that requests may name from now on, and return its identity. Raises ModelError."""
        if name == self.model_name:
            raise ModelError(f"{folder}: an adapter cannot have the name of the model, {name}")
        return self.adapters.add(name, folder)

    # ---- for programs that run an engine alone; workers use `admission`, which offers more ----

    def submit(self, request: Request) -> None:
        """Submit a request to prefill and decode here; `step` returns its outputs.

        Waits until its adapter is ready. Raises Refusal and ValueError as Admission.admit does.
        """
        try:
            self.admission.submit(request)
        except Refusal as refusal:
            if refusal.reason != "adapter_loading":
                raise
            self.adapters.wait(request.adapter)
            self.admission.submit(request)

    def cancel(self, key: Key) -> None:
        """End a key in any state. Idempotent."""
        self.admission.cancel(key)

    def load_report(self) -> LoadReport:
        return LoadReport(
            step=self.step_number,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_waiting_tokens=self.lifecycle.num_waiting_tokens,
            num_blocks_total=self.num_blocks,
            blocks_by_holder=self.ledger.usage(),
            tokens_per_s=self._rate.per_s(),
            num_draft_tokens=sum(sum(counts.proposed) for counts in self.speculator.counts.values()),
            num_accepted_tokens=sum(sum(counts.accepted) for counts in self.speculator.counts.values()),
            ready_adapters=self.adapters.reported_ready,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is held by exactly its known holders. Waits for a running step."""
        with self._stepping, self.ledger.lock:
            self.ledger.check_integrity()
            self.ledger.check_holders(self.lifecycle.holdings(), self.lifecycle.window_holdings())
            assert self.ledger.num_reserved == self.lifecycle.num_promised()
            if (states := self.ledger.states) is not None:
                states.check_holders(self.lifecycle.state_holdings())
                assert states.num_reserved == self.lifecycle.num_states_promised()

    # ---- of the loop ----

    def has_work(self) -> bool:
        has_input = bool(self.inbox or self._deferred or self._pending)
        return has_input or bool(self._flights) or self.scheduler.has_work()

    def step(self) -> list[Output]:
        """Run one step and return its outputs.

        If the launcher overlaps steps, a step is launched, and read after its successors are launched: by the next
        call, or by the same one if launching itself computes. Commands are obeyed meanwhile, except those for keys in
        flight. These, deadlines, and steps that cannot be launched ahead wait until nothing is in flight, so blocks are
        released only after the steps that touch them.
        """
        with self._stepping, self.runner.launcher.stream_context():
            self._outputs, self._computing = [], []
            failpoints.hit("engine.step")
            now, launcher = time.monotonic(), self.runner.launcher
            if self._flights:
                self._obey_behind()
                with self.ledger.lock:
                    is_due = self.lifecycle.groups.is_due(now)
                self._collect_step(goes_on=not (self._deferred or is_due))
                if self._flights or not launcher.draws:
                    return self._outputs
            while self._deferred:
                self._obey(self._deferred.popleft())
            for command in chain(self.inbox.drain(), self._pending.take_ready()):
                self._obey(command)
            self._end_expired(now)
            slices = self.scheduler.schedule(launcher.num_stages if self._overlaps else 1)
            self.has_computed, self.last_batch_size = bool(slices), len(slices)
            if not slices:
                self.speculator.close_all()
                return self._outputs
            if not (self._overlaps and self.runner.can_launch(slices)):
                self._run_step(slices)
                return self._outputs
            self._launch_step(slices)
            if not launcher.draws:
                self._collect_step(goes_on=True)
            return self._outputs

    def fail(self, message: str) -> list[Output]:
        """Recover from a step that raised, and return its outputs: those made before, and the ends of the keys that it
        computed.

        A lone key ends as `failed`, several as `failed_together`. If it computed none, every key ends. Their blocks are
        released, and the engine keeps running.
        """
        with self._stepping:
            with suppress(Exception):  # if the device is lost, nothing computes there either
                self.runner.launcher.wait()
            computing = [*self._computing, *(piece for flight in self._flights for piece in flight.slices)]
            self._flights.clear()
            self.output_processor.forget()
            groups = list(dict.fromkeys(piece.seq.group for piece in computing))
            with self.ledger.lock:
                groups = groups or list(self.lifecycle.groups.values())
            for group in groups:
                self._end(group, "failed" if len(groups) == 1 else "failed_together", message)
            return self._outputs

    @property
    def _overlaps(self) -> bool:
        """Whether steps are launched ahead: not with proposers, which need the tokens drawn before."""
        return self.runner.launcher.overlaps and not self.speculator.proposers

    def _collect_step(self, goes_on: bool) -> None:
        """Read the oldest flight; if `goes_on`, launch the steps that may follow those in flight first."""
        launcher = self.runner.launcher
        while goes_on and len(self._flights) < launcher.depth:
            following = self.scheduler.follow([flight.slices for flight in self._flights], launcher.num_stages)
            if not following or not self.runner.can_launch(following):
                break
            self.output_processor.keep_states(self._flights[-1].slices, {piece.seq for piece in following})
            self._launch_step(following)
            self.last_batch_size = len(following)
        flight = self._flights.popleft()
        self._computing, in_flight = flight.slices, {piece.seq for other in self._flights for piece in other.slices}
        drawn = flight.read()
        self.step_number += 1
        self.work.add(flight.slices)
        self.output_processor.collect(flight.slices, drawn, flight.launched_at, self._outputs, in_flight)
        self._rate.add(sum(len(samples) for _, samples in drawn))
        self._computing = []

    def _obey_behind(self) -> None:
        """Obey commands for keys that are not in flight; defer the others until nothing is in flight."""
        in_flight = {piece.seq.group.key for flight in self._flights for piece in flight.slices}
        in_flight |= {command.key for command in self._deferred}
        for command in chain(self.inbox.drain(), self._pending.take_ready()):
            if command.key in in_flight:
                self._deferred.append(command)
            else:
                self._obey(command)

    def _launch_step(self, slices: list[Slice]) -> None:
        """Launch a step after those in flight; `_collect_step` reads it."""
        previous = self._flights[-1] if self._flights else None
        self._computing = slices
        self._note_launch(slices, time.monotonic())
        on_layer = layer_watermark(slices, self.layout, self.on_progress)
        self._flights.append(self.runner.launch(slices, previous, on_layer))
        self._computing = []

    def _note_launch(self, slices: list[Slice], launched_at: float) -> None:
        for seq, _, _ in slices:
            if seq.group.launched_at is None and not seq.group.prefilled:
                self.lifecycle.happen(seq.group, GroupEvent.LAUNCH, launched_at)

    def _run_step(self, slices: list[Slice]) -> None:
        """Compute a step, or several in one call, from proposals to outputs, with nothing in flight."""
        self._computing = slices
        launched_at = time.monotonic()
        self._note_launch(slices, launched_at)
        num_tokens = sum(end - begin for _, begin, end in slices)
        self.speculator.draft(slices, self.config.max_num_batched_tokens - num_tokens)
        self.runner.keeps_hidden = self.speculator.wants_hidden
        on_layer = layer_watermark(slices, self.layout, self.on_progress)
        drawn, num_steps = compute(
            self.runner, self._multi_step, slices, self.scheduler, on_layer, self.speculator.num_plain_steps
        )
        self.step_number += num_steps
        self.work.add(slices, num_steps)
        self.speculator.measure(drawn, num_steps)
        self.output_processor.collect(slices, drawn, launched_at, self._outputs, num_steps=num_steps)
        self.speculator.advance(drawn, self.runner.hidden)
        self._rate.add(sum(len(samples) for _, samples in drawn))

    def _obey(self, command: Command) -> None:
        """Obey a command. An exception ends only the command's key."""
        if isinstance(command, RequestEnded):
            self._outputs.append(command)
            return
        group = self.lifecycle.groups.find(command.key, command.arrival)
        if group is None:
            return
        try:
            self._obey_for(group, command)
        except Exception as error:
            logger.exception("%s failed for %s", type(command).__name__, command.key)
            self._end(group, "failed", f"{type(command).__name__} failed: {type(error).__name__}: {error}")

    def _obey_for(self, group: SequenceGroup, command: GroupCommand) -> None:
        match command:
            case Enter() | Start() | Park() | Resume() if self._pending.keeps(group.grammar, command):
                pass
            case Enter() | Start() if group.grammar is not None and (error := group.grammar.exception()):
                self._end(group, "constraint", f"constraint: {error}")
            case Enter():
                self.lifecycle.happen(group, GroupEvent.ENTER)
            case Start():
                self._start(group, command.first_tokens)
            case Stop():
                self._end(group, "cancelled")
            case Park():
                if group.prefilled:  # a prompt that is being computed has nothing to continue from yet
                    self.lifecycle.happen(group, GroupEvent.PARK)
            case Resume():
                self.lifecycle.happen(group, GroupEvent.RESUME)

    def _start(self, group: SequenceGroup, first_tokens: tuple[FirstToken, ...]) -> None:
        if not first_tokens:
            self._end(group)
            return
        self.scheduler.fork(group.trunk, list(first_tokens))
        self.lifecycle.happen(group, GroupEvent.JOIN)

    def _end_expired(self, now: float) -> None:
        while True:
            with self.ledger.lock:
                group = self.lifecycle.groups.pop_expired(now)
            if group is None:
                return
            self._let_end(group, GroupEvent.DEADLINE, Ending("deadline", "the deadline has passed"))

    def _end(self, group: SequenceGroup, error: str = "", message: str = "") -> None:
        """End a group, unless it has ended already."""
        self._let_end(group, GroupEvent.END, Ending(error, message))

    def _let_end(self, group: SequenceGroup, event: GroupEvent, ending: Ending) -> None:
        if (ended := self.lifecycle.happen(group, event, ending)) is not None:
            self._outputs.append(ended)
