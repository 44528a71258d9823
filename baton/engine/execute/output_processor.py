"""Collect the outputs of a step: progress of held prefills, first tokens, runs of tokens, endings."""

import time
from collections.abc import Set

from baton.engine.core.request import FirstToken, Output, PrefillDone, Progress, RequestEnded, TokenRun
from baton.engine.execute.runner import Runner
from baton.engine.sampling.sampler import Sampled
from baton.engine.schedule.lifecycle import Ending, GroupLifecycle
from baton.engine.schedule.scheduler import Scheduler, Slice
from baton.engine.schedule.sequence import Group, Sequence
from baton.engine.schedule.states import GroupEvent, GroupState
from baton.engine.schedule.step_work import Drawn
from baton.engine.speculation.control.verify import num_right

BY_ITSELF = Ending()


class OutputProcessor:
    """Turns a step that has passed into outputs, and its sequences into what the next step starts from. The loop's."""

    def __init__(self, scheduler: Scheduler, lifecycle: GroupLifecycle, runner: Runner):
        self.scheduler = scheduler
        self.lifecycle = lifecycle
        self.ledger = lifecycle.ledger
        self.runner = runner
        self.num_layers = runner.pool.num_layers
        self._in_flight: Set[Sequence] = frozenset()
        self._over: set[Sequence] = set()  # ended, in a flight that has not passed

    def keep_states(self, slices: list[Slice], in_flight: Set[Sequence]) -> None:
        """Copy the states that are kept behind `slices`, which are being computed, of sequences `in_flight`: a step
        that folds more into those is about to be launched."""
        states, step = self.ledger.states, self.scheduler.config.checkpoint_step
        if states is None:
            return
        with self.ledger.lock:
            for seq, begin, end in slices:
                if seq in in_flight and seq.keeps_state(begin, end, self.ledger, step):
                    seq.recurrent.copy_ahead(states, self.scheduler.copies.state)

    def collect(
        self, slices: list[Slice], drawn: list[Drawn], launched_at: float, outputs: list[Output],
        in_flight: Set[Sequence] = frozenset(), num_steps: int = 1,
    ) -> None:  # fmt: skip
        """`slices` as launched at `launched_at` (time.monotonic()), `drawn` as the runner gave it back. `in_flight`:
        sequences of a step that was launched since; one of them that ends here keeps its blocks until that one is
        collected, whose token for it is dropped. `num_steps`: one behind the other, each with the token of the one
        before."""
        self._in_flight = in_flight
        step, copies = self.scheduler.config.checkpoint_step, self.scheduler.copies
        for seq, begin, end in slices:
            if seq in self._over:
                continue
            seq.note_computed(begin, end, self.ledger, step, copies, seq in in_flight)
            group = seq.group
            if not group.prefilled:
                group.num_chunks += 1
                if group.is_for_taker:
                    outputs.append(Progress(group.key, end, self.num_layers))
        stepped: dict[Group, None] = {}  # in order
        landed: dict[Group, None] = {}
        for seq, samples in drawn:
            if seq.masks is not None and not self._keeps(seq, samples, outputs):
                continue
            if not seq.group.prefilled:
                self._first_tokens(seq, samples, outputs)
                continue
            landed[seq.group] = None
            if seq in self._over:
                self._over.remove(seq)
                self._leave(seq)
                continue
            stepped[seq.group] = None
            outputs.append(self._next_tokens(seq, samples))
        for seq, _, end in slices:
            if seq.group.pooler is not None and end == seq.num_tokens:
                self._first_tokens(seq, [], outputs)  # there are none: its end
        for group in stepped:
            group.note_steps(launched_at, num_steps)
        outputs += filter(None, [self._end(group) for group in landed if not group.live])

    def forget(self) -> None:
        """After a step that failed: nothing is in flight."""
        self._over.clear()

    def _keeps(self, seq: Sequence, samples: list[Sampled], outputs: list[Output]) -> bool:
        """Take out the samples behind the last token that its constraint allows; where there is none, the group
        ends."""
        masks = seq.take_masks()
        if masks.num_good == 0:
            outputs += filter(None, [self._end(seq.group, Ending("constraint", f"constraint: {masks.problem}"))])
        elif seq.group.prefilled:
            del samples[masks.num_good :]
        return seq.group.state is not GroupState.FINISHED

    def _next_tokens(self, seq: Sequence, samples: list[Sampled]) -> TokenRun:
        """Append a choice's next tokens, up to the one that ends it; the samples after that are taken out."""
        first_index, finish_reason = seq.num_output, None
        for index, sample in enumerate(samples):
            finish_reason = seq.append(sample.token_id)
            if finish_reason is not None:
                del samples[index + 1 :]
        if seq.draft_ids:
            seq.group.drafted.add(len(seq.draft_ids), num_right(samples, seq.draft_ids))
        if len(samples) > 1:  # KV of what was accepted is there; that of wrong proposals is overwritten
            seq.num_computed += len(samples) - 1
            seq.recurrent.num_pending = len(samples) - 1
            seq.seal(self.ledger)
        if finish_reason is not None:
            self._finish(seq)
        token_ids = tuple(sample.token_id for sample in samples)
        logprobs = tuple(sample.logprobs for sample in samples if sample.logprobs is not None)
        return TokenRun(seq.group.key, seq.choice, first_index, token_ids, logprobs, finish_reason)

    def _finish(self, seq: Sequence) -> None:
        """A choice is complete: its blocks go back, whole units of prompt and output stay in the cache."""
        self.scheduler.remove(seq)
        self.scheduler.lengths.observe(seq.num_output)
        if seq in self._in_flight:
            self._over.add(seq)
        else:
            self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        seq.give_back(self.ledger)
        seq.group.live.remove(seq)

    def _first_tokens(self, trunk: Sequence, samples: list[Sampled], outputs: list[Output]) -> None:
        """End the reading of a prompt. A held prefill waits for its taker; any other continues with its live
        choices."""
        group = trunk.group
        firsts = tuple(self._first_token(trunk, choice, sample) for choice, sample in enumerate(samples))
        prompt_logprobs, group.prompt_logprobs = tuple(group.prompt_logprobs), []
        outputs.append(
            PrefillDone(
                group.key,
                firsts,
                queue_s=group.launched_at - group.accepted_at,
                prefill_s=time.monotonic() - group.launched_at,
                num_cached_tokens=group.num_cached_tokens,
                num_chunks=group.num_chunks,
                prompt_logprobs=prompt_logprobs,
                pooled=group.pooled,
                waits=group.waits,
            )
        )
        group.note_first_tokens()
        if group.is_for_taker:
            self.lifecycle.happen(group, GroupEvent.HOLD)
        elif going_on := [first for first in firsts if first.finish_reason is None]:
            self.scheduler.fork(trunk, going_on)
        else:
            outputs += filter(None, [self._end(group)])

    def _end(self, group: Group, ending: Ending = BY_ITSELF) -> RequestEnded | None:
        return self.lifecycle.happen(group, GroupEvent.END, ending)

    def _first_token(self, trunk: Sequence, choice: int, sample: Sampled) -> FirstToken:
        finish_reason = trunk.finish_reason(sample.token_id)
        return FirstToken(choice, sample.token_id, sample.logprobs, finish_reason)
