"""Who proposes for which sequence of a step, and what became of it.

    draft      before a step: proposals are put behind the last tokens of its decoding sequences (Sequence.draft_ids)
    measure    it has been computed: what it cost
    advance    its results are out: acceptance, and hidden states back to the proposers

A decoding sequence is open at a proposer from the first step in which it is asked for until a step without it. Where
several proposers run, prompt lookup is asked first, since it costs next to nothing, unless its guesses for a sequence
have been clearly worse; a model is asked for the sequences that are left.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from baton.engine.runner import Drawn
from baton.engine.scheduler import Scheduler, Slice
from baton.engine.sequence import DraftCounts, Sequence
from baton.engine.speculation.controller import Acceptance, Controller, limit_of
from baton.engine.speculation.proposer import Advance, Ask, Draftee, Proposer
from baton.engine.speculation.verify import num_right

WORSE = 0.15  # of acceptance: what a proposer that costs next to nothing may have less than a model


@dataclass(slots=True, eq=False)
class Track:
    """One sequence at one proposer."""

    acceptance: Acceptance
    draftee: Draftee | None = None  # once it is asked


class Speculator:
    """Belongs to the loop's thread. `proposers` in the order in which they are asked; none: every step is plain."""

    def __init__(
        self,
        proposers: Iterable[Proposer],
        scheduler: Scheduler,
        num_draft_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`num_draft_tokens`: always so many, whether it pays or not; None: as many as pay."""
        self.proposers = {proposer.name: proposer for proposer in proposers}
        self.controller = Controller()
        self.counts = {name: DraftCounts() for name in self.proposers}  # since the start
        self._last = next(reversed(self.proposers), "")  # has no other behind it
        self._scheduler = scheduler
        self._num_draft_tokens = num_draft_tokens
        self._clock = clock
        self._tracks: dict[str, dict[Sequence, Track]] = {name: {} for name in self.proposers}
        self._decoding: list[Sequence] = []
        self._proposers_of: dict[Sequence, str] = {}  # whose proposals a sequence has in this step
        self._draft_s = 0.0
        self._begun_at = 0.0
        self._has_chunks = self._is_asked = False

    @property
    def num_bytes(self) -> int:
        """Memory beyond the target's."""
        return sum(proposer.num_bytes for proposer in self.proposers.values())

    @property
    def start_words(self) -> str:
        """For the engine's start line; empty: it does not speculate."""
        if not self.proposers:
            return ""
        width = "as many tokens as pay" if self._num_draft_tokens is None else f"{self._num_draft_tokens} tokens a step"
        return f"; speculation by {', '.join(self.proposers)}, {width} ({self.num_bytes / (1 << 20):.0f} MiB)"

    @property
    def wants_hidden(self) -> bool:
        """Whether a proposer with open sequences reads the hidden states of this step."""
        return any(
            proposer.wants_hidden and any(track.draftee is not None for track in self._tracks[name].values())
            for name, proposer in self.proposers.items()
        )

    # ---- before a step ----

    def draft(self, slices: list[Slice], num_free_tokens: int) -> None:
        """Proposals for the decoding sequences among `slices`, at most `num_free_tokens` (the step's budget) in all."""
        if not self.proposers:
            return
        self._begun_at = begun_at = self._clock()
        self._proposers_of, self._is_asked = {}, False
        self._decoding = [seq for seq, begin, end in slices if end - begin == 1 and seq.group.prefilled]
        self._has_chunks = len(self._decoding) < len(slices)
        self._close_absent()
        left = self._decoding
        for name, proposer in self.proposers.items():
            if not left or num_free_tokens <= 0:
                break
            num_free_tokens -= self._ask(proposer, [seq for seq in left if self._suits(seq, name)], num_free_tokens)
            left = [seq for seq in left if seq not in self._proposers_of]
        self._draft_s = self._clock() - begun_at

    def _close_absent(self) -> None:
        decoding = None
        for name, tracks in self._tracks.items():
            if not tracks:
                continue
            decoding = decoding if decoding is not None else set(self._decoding)
            for seq in [seq for seq in tracks if seq not in decoding]:
                self._close(self.proposers[name], tracks.pop(seq))

    def close_all(self) -> None:
        """Nothing is computed in this step."""
        self._decoding = []
        self._close_absent()

    def _suits(self, seq: Sequence, name: str) -> bool:
        """Whether this proposer is to guess for the sequence, if it pays."""
        asked = seq.group.request.speculation
        if asked.num_tokens == 0 or asked.proposer not in ("", name):
            return False
        if name in (self._last, asked.proposer):
            return True
        return self._rate(name, seq) > self._rate(self._last, seq) - WORSE

    def _rate(self, name: str, seq: Sequence) -> float:
        track, prior = self._tracks[name].get(seq), self.controller.prior(name)
        return prior if track is None else track.acceptance.rate(prior)

    def _ask(self, proposer: Proposer, seqs: list[Sequence], budget: int) -> int:
        """Asks one proposer for those of the sequences for which it pays; how many tokens it proposed."""
        widths = self._widths(proposer, seqs, budget)
        wanted = [(seq, width) for seq, width in zip(seqs, widths, strict=True) if width > 0]
        if not wanted:
            self._rest(proposer)
            return 0
        asks = [Ask(self._open(proposer, seq), width) for seq, width in wanted]
        proposer.prepare([draftee for draftee, _ in asks], budget)
        self._is_asked = True
        begun_at = self._clock()
        drafts = proposer.propose(asks)
        if width := max(len(draft) for draft in drafts):
            self.controller.costs.add_draft(proposer.name, len(wanted), width, self._clock() - begun_at)
        num_proposed = 0
        for (seq, width), draft in zip(wanted, drafts, strict=True):
            room = self._scheduler.room_for_draft(seq, min(len(draft), width, budget - num_proposed))
            if room > 0:
                seq.draft_ids = draft[:room]
                self._proposers_of[seq] = proposer.name
                num_proposed += room
        return num_proposed

    def _track(self, name: str, seq: Sequence) -> Track:
        track = self._tracks[name].get(seq)
        if track is None:
            track = self._tracks[name][seq] = Track(Acceptance())
        return track

    def _open(self, proposer: Proposer, seq: Sequence) -> Draftee:
        track = self._track(proposer.name, seq)
        if track.draftee is None:
            track.draftee = Draftee(seq.group.request, seq.choice, seq.token_ids)
            proposer.open(track.draftee)
        return track.draftee

    def _close(self, proposer: Proposer, track: Track) -> None:
        if track.draftee is not None:
            proposer.close(track.draftee)
            track.draftee = None

    def _rest(self, proposer: Proposer) -> None:
        """Nobody wants it now. What follows the target's hidden states would have to be told of every step."""
        if proposer.wants_hidden:
            for track in self._tracks[proposer.name].values():
                self._close(proposer, track)

    def _widths(self, proposer: Proposer, seqs: list[Sequence], budget: int) -> list[int]:
        name, controller, num_seqs = proposer.name, self.controller, len(self._decoding)
        limits = [self._limit(seq, budget) for seq in seqs]
        fixed = [self._fixed(seq) for seq in seqs]
        widths = [min(limit, width or 0) for limit, width in zip(limits, fixed, strict=True)]
        free = [index for index, width in enumerate(fixed) if width is None and limits[index] > 0]
        if not free or self._has_chunks or controller.wants_plain(num_seqs) or controller.is_resting(name, num_seqs):
            return widths
        own = [self._track(name, seqs[index]).acceptance for index in free]
        chosen = controller.widths(name, num_seqs, own, [limits[index] for index in free])
        for index, width in zip(free, chosen, strict=True):
            widths[index] = width
        return widths

    def _fixed(self, seq: Sequence) -> int | None:
        asked = seq.group.request.speculation.num_tokens
        return asked if asked is not None else self._num_draft_tokens

    def _limit(self, seq: Sequence, budget: int) -> int:
        request = seq.group.request
        num_positions = self._scheduler.config.max_model_len - seq.num_tokens
        return limit_of(request.max_tokens - seq.num_output, num_positions, budget)

    # ---- after it ----

    def measure(self, drawn: list[Drawn]) -> None:
        """The step has been computed; `drawn` is what came of it."""
        if not self._decoding or self._has_chunks:
            return
        step_s = self._clock() - self._begun_at - self._draft_s
        num_seqs, num_proposed = len(self._decoding), sum(len(seq.draft_ids) for seq in self._proposers_of)
        plain_s = self.controller.costs.plain_s(num_seqs)
        self.controller.passed(num_seqs, num_proposed, step_s, self._draft_s if self._is_asked else 0.0)
        if num_proposed and plain_s is not None:
            self._save(drawn, plain_s, step_s + self._draft_s)

    def _save(self, drawn: list[Drawn], plain_s: float, spent_s: float) -> None:
        """Counts for each request what its tokens would have taken one by one."""
        decoding, made = set(self._decoding), {}
        for seq, samples in drawn:
            if seq in decoding:
                made.setdefault(seq.group, []).append(len(samples))
        for group, counts in made.items():
            group.saved_s += plain_s * sum(counts) / len(counts) - spent_s

    def advance(self, drawn: list[Drawn], hidden: Tensor | None) -> None:
        """Its results are collected: what ended behind a token has been cut out of `drawn`. `hidden`: the rows that
        it was drawn from."""
        if not self._decoding or not (self._proposers_of or self.wants_hidden):
            return
        advances: dict[str, list[Advance]] = {name: [] for name in self.proposers}
        first_row = 0
        for seq, samples in drawn:
            draft_ids, name = seq.draft_ids, self._proposers_of.get(seq)
            num_accepted = num_right(samples, draft_ids)
            if name is not None:
                self.counts[name].add(len(draft_ids), num_accepted)
                self.controller.judged(name, self._tracks[name][seq].acceptance, len(draft_ids), num_accepted)
                seq.draft_ids = []
            if seq.block_ids:  # it goes on
                for other, tracks in self._tracks.items():
                    if (track := tracks.get(seq)) is not None and track.draftee is not None:
                        num_proposed = len(draft_ids) if other == name else 0
                        advances[other].append(Advance(track.draftee, num_proposed, num_accepted, first_row))
            first_row += 1 + len(draft_ids)
        for name, steps in advances.items():
            if steps:
                self.proposers[name].advance(steps, hidden)
