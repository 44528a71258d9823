"""Collect the outputs of a step: progress of held prefills, first tokens, runs of tokens, and ends."""

import time
from collections.abc import Set

from baton.engine.core.request import FirstToken, Output, PrefillDone, Progress, RequestEnded, TokenRun
from baton.engine.execute.runner import Runner
from baton.engine.sampling.sampler import Sampled
from baton.engine.schedule.group_actions import Ending
from baton.engine.schedule.lifecycle import GroupLifecycle
from baton.engine.schedule.scheduler import Scheduler
from baton.engine.schedule.sequence import Sequence, SequenceGroup
from baton.engine.schedule.states import GroupEvent, GroupState
from baton.engine.schedule.steps import Drawn, Slice
from baton.engine.speculation.control.verify import num_right

BY_ITSELF = Ending()


class OutputProcessor:
    """Turns a computed step into outputs, and updates its sequences for the next one. Belongs to the loop's thread."""

    def __init__(self, scheduler: Scheduler, lifecycle: GroupLifecycle, runner: Runner):
        self.scheduler = scheduler
        self.lifecycle = lifecycle
        self.ledger = lifecycle.ledger
        self.runner = runner
        self.num_layers = runner.pool.num_layers
        self._in_flight: Set[Sequence] = frozenset()
        self._over: set[Sequence] = set()  # ended, but part of a step in flight

    def keep_states(self, slices: list[Slice], in_flight: Set[Sequence]) -> None:
        """Copy states that are to be checkpoints after `slices`, before a step launches that continues them.

        `slices` are being computed; the step to be launched has the sequences `in_flight`.
        """
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
        """Add the outputs of a computed step to `outputs`.

        `slices` were launched at `launched_at` (time.monotonic()); `drawn` is the runner's result; `num_steps` decode
        steps were computed in one call. `in_flight` are the sequences of steps launched since: one that ends now keeps
        its blocks until these are collected, and its tokens in them are dropped.
        """
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
        stepped: dict[SequenceGroup, None] = {}  # in order
        landed: dict[SequenceGroup, None] = {}
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
                self._first_tokens(seq, [], outputs)  # without tokens: the prompt's end
        for group in stepped:
            group.note_steps(launched_at, num_steps)
        outputs += filter(None, [self._end(group) for group in landed if not group.live])

    def forget(self) -> None:
        """Forget sequences in flight, after a step failed."""
        self._over.clear()

    def _keeps(self, seq: Sequence, samples: list[Sampled], outputs: list[Output]) -> bool:
        """Cut the samples after the last token that the constraint allows, or end the group if there is none.

        Returns whether the group still lives.
        """
        masks = seq.pop_masks()
        if masks.num_good == 0:
            outputs += filter(None, [self._end(seq.group, Ending("constraint", f"constraint: {masks.problem}"))])
        elif seq.group.prefilled:
            del samples[masks.num_good :]
        return seq.group.state is not GroupState.FINISHED

    def _next_tokens(self, seq: Sequence, samples: list[Sampled]) -> TokenRun:
        """Append a choice's next tokens, up to one that ends it, and return them. The samples after that are cut."""
        first_index, finish_reason = seq.num_output, None
        for index, sample in enumerate(samples):
            finish_reason = seq.append(sample.token_id)
            if finish_reason is not None:
                del samples[index + 1 :]
        if seq.draft_ids:
            seq.group.drafted.add(len(seq.draft_ids), num_right(samples, seq.draft_ids))
        if len(samples) > 1:  # KV of accepted proposals is computed; that of wrong ones is overwritten
            seq.num_computed += len(samples) - 1
            seq.recurrent.num_pending = len(samples) - 1
            seq.seal(self.ledger)
        if finish_reason is not None:
            self._finish(seq)
        token_ids = tuple(sample.token_id for sample in samples)
        logprobs = tuple(sample.logprobs for sample in samples if sample.logprobs is not None)
        return TokenRun(seq.group.key, seq.choice, first_index, token_ids, logprobs, finish_reason)

    def _finish(self, seq: Sequence) -> None:
        """End a choice: release its blocks, or leave that to the step in flight with it."""
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
        """Output the end of a prompt. A held prefill then waits for its taker; any other continues with its live
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

    def _end(self, group: SequenceGroup, ending: Ending = BY_ITSELF) -> RequestEnded | None:
        return self.lifecycle.happen(group, GroupEvent.END, ending)

    def _first_token(self, trunk: Sequence, choice: int, sample: Sampled) -> FirstToken:
        finish_reason = trunk.finish_reason(sample.token_id)
        return FirstToken(choice, sample.token_id, sample.logprobs, finish_reason)
