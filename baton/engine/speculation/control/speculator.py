"""Choose the proposer for each sequence of a step, and judge its proposals.

    draft      before a step: put proposals after the last tokens of its decoding sequences (Sequence.draft_ids)
    measure    after the step is computed: record its cost
    advance    after its results are out: judge the proposals, pass hidden states to the proposers

A decoding sequence is open at a proposer from the first step in which it is asked for until a step without it. If
several proposers run, prompt lookup is asked first, since it costs next to nothing, except for sequences for which its
guesses have been clearly worse; a model is asked for the sequences that are left. A quick proposer is asked first, and
then the number of its proposals to verify is decided; for the other proposers that number is decided first.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.schedule.counters import DraftCounts
from baton.engine.schedule.scheduler import Scheduler
from baton.engine.schedule.sequence import Sequence, SequenceGroup
from baton.engine.schedule.steps import Drawn, Slice
from baton.engine.speculation.control.controller import Controller, limit_of
from baton.engine.speculation.control.draft_plan import DraftCandidates, StepOutcome
from baton.engine.speculation.control.tracks import Tracks
from baton.engine.speculation.control.verify import num_right
from baton.engine.speculation.proposers.proposer import Advance, DraftRequest, Proposer

QUICK_MARGIN = 0.15  # by how much a quick proposer's acceptance may be below a model's


class DecodingSequences(NamedTuple):
    """Hold the decoding sequences of a step and what their requests ask for, until a sequence comes or goes."""

    seqs: list[Sequence]
    candidates: dict[str, list[Sequence]]  # of each proposer, the sequences whose requests allow it
    has_fixed: bool  # some request has a width of its own
    has_free: bool  # some request has none


@dataclass(slots=True)
class DraftedStep:
    """Hold one step from its drafts until its results are out."""

    has_chunks: bool = False  # whether it also computes chunks of prompts
    proposer_of: dict[Sequence, str] = field(default_factory=dict)  # the proposer of each sequence's proposals
    asked: list[str] = field(default_factory=list)  # proposers asked, with or without result
    adaptive: list[str] = field(default_factory=list)  # those of them whose widths the controller decides
    begun_at: float | None = None  # None: the step is not timed
    draft_s: float = 0.0


def clock_for(device: torch.device) -> Callable[[], float]:
    """Return the clock for steps: on a CPU the loop thread's own CPU time, so that other users of the core do not make
    a step look dearer; on a GPU the wall clock, since the loop waits."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


class Speculator:
    """Draft and judge the proposals of an engine's steps. Used by the loop's thread alone. `proposers` are asked in
    this order; without any, every step is plain."""

    def __init__(
        self,
        proposers: Iterable[Proposer],
        scheduler: Scheduler,
        num_draft_tokens: int | None,
        clock: Callable[[], float],
        steps_a_call: int,
    ):
        """Speculate with `num_draft_tokens` per step whether they pay or not; None: with as many as pay.
        `steps_a_call`: the most steps that the engine does in one call while nothing is proposed."""
        proposers = list(proposers)
        self.proposers = {proposer.name: proposer for proposer in proposers}
        self.controller = Controller(steps_a_call)
        self.counts = {name: DraftCounts() for name in self.proposers}  # since the start
        self._followers = [each.name for each in proposers if type(each).advance is not Proposer.advance]
        self._last = next(reversed(self.proposers), "")  # the only one after which no other is asked
        self._scheduler = scheduler
        self._num_draft_tokens = num_draft_tokens
        self._clock = clock
        self._tracks = {name: Tracks(proposer) for name, proposer in self.proposers.items()}
        self._decoding = DecodingSequences([], {}, False, False)
        self._step = DraftedStep()
        self._advance_s = 0.0  # seconds of `advance` after the last step
        self._unpriced: list[tuple[SequenceGroup, float, float]] = []  # waiting until a plain step is measured

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory beyond the target's."""
        return sum(proposer.num_bytes for proposer in self.proposers.values())

    @property
    def summary(self) -> str:
        """Return the words on speculation for the engine's start line; empty without it."""
        if not self.proposers:
            return ""
        width = "as many tokens as pay" if self._num_draft_tokens is None else f"{self._num_draft_tokens} tokens a step"
        return f"; speculation by {', '.join(self.proposers)}, {width} ({self.num_bytes / (1 << 20):.0f} MiB)"

    @property
    def wants_hidden(self) -> bool:
        """Return whether a proposer with open sequences reads the hidden states of this step."""
        return any(tracks.proposer.wants_hidden and tracks.num_open for tracks in self._tracks.values())

    # ---- before a step ----

    def draft(self, slices: list[Slice], num_free_tokens: int) -> None:
        """Put proposals on the decoding sequences among `slices`, at most `num_free_tokens` (the rest of the step's
        budget) in all."""
        if not self.proposers:
            return
        seqs = [seq for seq, begin, end in slices if end - begin == 1 and seq.group.prefilled]
        step = self._step = DraftedStep(has_chunks=len(seqs) < len(slices))
        if seqs != self._decoding.seqs:
            self._change(seqs)
        decoding, controller, num_seqs = self._decoding, self.controller, len(seqs)
        controller.begin(num_seqs)
        for name in self.proposers:
            if not decoding.has_fixed and step.has_chunks:
                continue
            if not decoding.has_fixed and controller.is_resting(name, num_seqs):
                self._tracks[name].rest()  # its try ends
                continue
            if num_free_tokens <= 0 or not decoding.candidates[name]:
                continue
            if not step.has_chunks and controller.wants_plain(num_seqs, decoding.has_free):
                break
            if step.begun_at is None:
                step.begun_at = self._clock()
            num_free_tokens -= self._ask(name, num_free_tokens)
        if step.begun_at is not None:
            step.draft_s = self._clock() - step.begun_at
        elif seqs and not step.has_chunks and controller.wants_time(num_seqs):
            step.begun_at = self._clock()

    def _change(self, seqs: list[Sequence]) -> None:
        """Note that other sequences decode than in the last step, and close those that no longer do."""
        before, now = set(self._decoding.seqs), set(seqs)
        self.controller.refill.note_change(len(now - before), len(before - now), len(now))
        for tracks in self._tracks.values():
            tracks.keep(now)
        wanted = {seq: seq.group.request.speculation for seq in seqs}
        candidates = {
            name: [seq for seq in seqs if wanted[seq].num_tokens != 0 and wanted[seq].proposer in ("", name)]
            for name in self.proposers
        }
        fixed = {self._fixed(seq) is not None for able in candidates.values() for seq in able}
        self._decoding = DecodingSequences(seqs, candidates, True in fixed, False in fixed)

    def close_all(self) -> None:
        """Close all sequences, since nothing is computed in this step."""
        if self._decoding.seqs:
            self._change([])

    def _suits(self, seq: Sequence, name: str) -> bool:
        """Return whether this proposer is to guess for the sequence, rather than the last one."""
        if name in (self._last, seq.group.request.speculation.proposer):
            return True
        return self._rate(name, seq) > self._rate(self._last, seq) - QUICK_MARGIN

    def _rate(self, name: str, seq: Sequence) -> float:
        track, prior = self._tracks[name].get(seq), self.controller.prior(name)
        return prior if track is None else track.acceptance.rate(prior)

    def _ask(self, name: str, budget: int) -> int:
        """Ask one proposer for the sequences for which it pays; return how many tokens it proposed."""
        step, tracks, seqs = self._step, self._tracks[name], self._decoding.candidates[name]
        if len(self.proposers) > 1:
            seqs = [seq for seq in seqs if seq not in step.proposer_of and self._suits(seq, name)]
        if not seqs:
            if not step.proposer_of:  # later proposers will guess for all of them
                self.controller.note_nothing_proposed(name)
            return 0
        step.asked.append(name)
        limits = [self._limit(seq, budget) for seq in seqs]
        if tracks.proposer.is_quick:
            drafts = _cut(seqs, self._looked_up(tracks, seqs, limits))
            if not any(drafts):
                self.controller.note_nothing_proposed(name)
                return 0
            widths = self._widths(name, seqs, [len(draft) for draft in drafts], True)
        else:
            widths = self._widths(name, seqs, limits, False)
            drafts = _cut(seqs, self._drafts(tracks, seqs, widths, budget))
        num_proposed = 0
        for seq, width, draft in zip(seqs, widths, drafts, strict=True):
            num_tokens = min(len(draft), width, budget - num_proposed)
            if num_tokens > 0 and (room := self._scheduler.room_for_draft(seq, num_tokens)) > 0:
                seq.draft_ids = draft[:room]
                step.proposer_of[seq] = name
                num_proposed += room
            elif draft:
                track = tracks[seq]
                track.unverified, track.unverified_at = draft, seq.num_tokens
        return num_proposed

    def _looked_up(self, tracks: Tracks, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return all proposals of a quick proposer, after judging those of its last look that were not verified."""
        proposer, asks, wanted = tracks.proposer, [], []
        drafts: list[list[int]] = [[] for _ in seqs]
        for index, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            if limit > 0:
                fixed = self._fixed(seq)
                asks.append(DraftRequest(tracks.open(seq), limit if fixed is None else min(limit, fixed)))
                wanted.append(index)
                track = tracks[seq]
                if track.unverified:
                    self.controller.note_accepted(proposer.name, track.acceptance, *track.judge())
        for index, draft in zip(wanted, proposer.propose(asks), strict=True):
            drafts[index] = draft
        return drafts

    def _drafts(self, tracks: Tracks, seqs: list[Sequence], widths: list[int], budget: int) -> list[list[int]]:
        """Return the proposals for each sequence, at most its width in tokens; none where that is 0."""
        drafts: list[list[int]] = [[] for _ in seqs]
        wanted = [index for index, width in enumerate(widths) if width > 0]
        if not wanted:
            return drafts
        asks = [DraftRequest(tracks.open(seqs[index]), widths[index]) for index in wanted]
        proposer, begun_at = tracks.proposer, self._clock()
        num_read = proposer.prepare([draftee for draftee, _ in asks], budget)
        if num_read:
            read_at, begun_at = begun_at, self._clock()
            self.controller.costs.add_read(proposer.name, num_read, begun_at - read_at)
        for index, draft in zip(wanted, proposer.propose(asks), strict=True):
            drafts[index] = draft
        if width := max(len(draft) for draft in drafts):
            self.controller.costs.add_draft(proposer.name, len(wanted), width, self._clock() - begun_at)
        return drafts

    def _widths(self, name: str, seqs: list[Sequence], limits: list[int], has_drafts: bool) -> list[int]:
        """Return the width of each sequence: its request's own, or else what Controller.widths decides."""
        fixed = [self._fixed(seq) for seq in seqs]
        widths = [min(limit, width or 0) for limit, width in zip(limits, fixed, strict=True)]
        if self._step.has_chunks:
            return widths
        self._step.adaptive.append(name)
        tracks = self._tracks[name]
        free = [index for index, width in enumerate(fixed) if width is None and limits[index] > 0]
        own = [tracks[seqs[index]].acceptance for index in free]
        free_limits = [limits[index] for index in free]
        unread = [0 if has_drafts else tracks.num_unread(seqs[index]) for index in free]
        num_reads = sum(self._by_token(seqs[index], num) for index, num in zip(free, unread, strict=True) if num)
        num_left = max((self._num_left(seqs[index]) for index in free), default=1)
        chosen = self.controller.widths(
            DraftCandidates(name, own, free_limits, has_drafts, num_reads, unread, num_left)
        )
        for index, width in zip(free, chosen, strict=True):
            widths[index] = width
        if not has_drafts and not any(widths):
            tracks.rest()
        return widths

    def _by_token(self, seq: Sequence, num_unread: int) -> float:
        return num_unread / self._num_left(seq)

    def _num_left(self, seq: Sequence) -> int:
        return self._scheduler.lengths.expected_left(seq.group.request, seq.num_output)

    def _fixed(self, seq: Sequence) -> int | None:
        wanted = seq.group.request.speculation.num_tokens
        return wanted if wanted is not None else self._num_draft_tokens

    def _limit(self, seq: Sequence, budget: int) -> int:
        request, scheduler = seq.group.request, self._scheduler
        if scheduler.ledger.states is not None and seq.group.is_named:
            # A state is kept after the first token of a step: one step has to begin with the last token before a
            # checkpoint.
            step = scheduler.config.checkpoint_step
            budget = min(budget, step - 1 - seq.num_tokens % step)
        return limit_of(request.max_tokens - seq.num_output, budget)

    @property
    def num_plain_steps(self) -> int:
        """Return in how many steps, the planned one included, nothing will be proposed as far as is known; 1 or
        more."""
        if self._step.proposer_of or self.wants_hidden:
            return 1
        decoding = self._decoding
        names = [name for name, seqs in decoding.candidates.items() if seqs]
        return self.controller.num_plain_steps(names, len(decoding.seqs), decoding.has_fixed)

    # ---- after it ----

    def measure(self, drawn: list[Drawn], num_steps: int) -> None:
        """Record the time of the step, or of several without proposals in one call, with `drawn` as the result."""
        step, controller, num_seqs = self._step, self.controller, len(self._decoding.seqs)
        if not num_seqs or step.has_chunks:
            return
        if step.begun_at is None:
            controller.note_plain_steps(num_steps)
            return
        step_s = (self._clock() - step.begun_at - step.draft_s) / num_steps
        draft_s = step.draft_s + self._advance_s
        adaptive = () if self._decoding.has_fixed else step.adaptive  # widths asked for anyway are not predicted
        if step.proposer_of:
            num_proposed = sum(len(seq.draft_ids) for seq in step.proposer_of)
            made = [len(samples) for _, samples in drawn]
            last, least = self._last_of_step(), min(made)
            controller.note_step(
                StepOutcome(sum(made), num_proposed, step_s, draft_s, adaptive, last=last, least_made=least)
            )
            self._unpriced += self._made(drawn, step_s + draft_s)
        else:
            controller.note_look(step.asked, step.draft_s)
            # A plain step between two looks says nothing of the steps that run several in one call.
            is_plain = not (controller.steps_a_call > 1 and self.num_plain_steps == 1)
            controller.note_step(StepOutcome(num_seqs, 0, step_s, draft_s, adaptive, num_steps, is_plain))
        if self._unpriced and (plain_s := controller.costs.plain_s(num_seqs)) is not None:
            for group, num_tokens, spent_s in self._unpriced:
                group.saved_s += plain_s * num_tokens - spent_s
            self._unpriced = []

    def _last_of_step(self) -> str:
        """Return the last proposer whose proposals are verified."""
        names = set(self._step.proposer_of.values())
        return names.pop() if len(names) == 1 else next(name for name in reversed(self.proposers) if name in names)

    def _made(self, drawn: list[Drawn], spent_s: float) -> list[tuple[SequenceGroup, float, float]]:
        """Return for each request its tokens, which plain steps would have made one by one, and their seconds."""
        if len(drawn) == 1:
            ((seq, samples),) = drawn
            return [(seq.group, len(samples), spent_s)]
        made: dict[SequenceGroup, list[int]] = {}
        for seq, samples in drawn:
            made.setdefault(seq.group, []).append(len(samples))
        return [(group, sum(counts) / len(counts), spent_s) for group, counts in made.items()]

    def advance(self, drawn: list[Drawn], hidden: Tensor | None) -> None:
        """Judge the proposals of a step and pass its results to the proposers. Tokens after a sequence's end are
        already cut from `drawn`. `hidden` [>= rows, hidden_size]: the rows the tokens were drawn from; None if no
        proposer wants them."""
        self._advance_s = 0.0
        proposer_of = self._step.proposer_of
        if not self._decoding.seqs or not (proposer_of or self.wants_hidden):
            return
        advances: dict[str, list[Advance]] = {name: [] for name in self._followers}
        first_row = 0
        for seq, samples in drawn:
            draft_ids, name = seq.draft_ids, proposer_of.get(seq)
            num_accepted = num_right(samples, draft_ids)
            if name is not None:
                self.counts[name].add(len(draft_ids), num_accepted)
                self.controller.note_accepted(name, self._tracks[name][seq].acceptance, len(draft_ids), num_accepted)
                seq.draft_ids = []
            if seq.blocks.ids:  # the sequence continues
                for other, steps in advances.items():
                    if (track := self._tracks[other].get(seq)) is not None and track.draftee is not None:
                        num_proposed = len(draft_ids) if other == name else 0
                        steps.append(Advance(track.draftee, num_proposed, num_accepted, first_row))
            first_row += 1 + len(draft_ids)
        for name, steps in advances.items():
            if steps:
                begun_at = self._clock()
                self.proposers[name].advance(steps, hidden)
                self._advance_s += self._clock() - begun_at


def _cut(seqs: list[Sequence], drafts: list[list[int]]) -> list[list[int]]:
    """Return the drafts as far as the constraints of their sequences allow."""
    return [
        draft[: seq.cursor.num_valid(draft)] if draft and seq.group.grammar is not None else draft
        for seq, draft in zip(seqs, drafts, strict=True)
    ]
