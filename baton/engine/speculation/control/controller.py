"""Decide how many tokens are proposed for each sequence: expected gain against cost, both measured.

    gain         a proposal at position j of a sequence is right with about a^j, where a is the sequence's own recent
                 acceptance rate; a new sequence begins with its proposer's recent rate
    cost         seconds of a plain step, of a verifying step beyond a plain one (by proposals and proposer), and of a
                 draft by its width, measured by this engine from its own steps for each number of sequences (in powers
                 of two), see costs.py. Plain steps are measured again and again, soon at first: a cold engine takes
                 three times as long
    correction   actual over predicted time of steps with a proposer, for each batch size. It covers what the costs
                 leave out: prompts that a draft reads, hidden states that are kept
    worth        tokens that all sequences gain save whole steps. What one gains beyond the slowest only frees its place
                 earlier, which counts as far as places are filled again, see Refill
    looks        a quick proposer is asked again soon, as long as such looks gain more than they take

For each step the width with the most tokens per second is chosen, or none if that is not MIN_GAIN times plain decoding
(MIN_DRAFT_GAIN if the tokens have to be drafted). A proposer that is off is looked at again every LOOK_INTERVAL steps,
and tried out of an allowance that grows with the time of plain steps, see proposer_state.py. Guesses of a quick
proposer are judged by the tokens that came, verified or not. So speculation that does not pay costs little more than
ALLOWANCE, whatever the text and the load.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import mul

from baton.engine.speculation.control.acceptance import LATELY_FORGET, AcceptanceRate
from baton.engine.speculation.control.costs import Costs
from baton.engine.speculation.control.draft_plan import DraftCandidates, DraftPlan, StepOutcome
from baton.engine.speculation.control.proposer_state import FIRST_ALLOWANCE, SMALL_BATCH, ProposerState
from baton.protocol import MAX_DRAFT_TOKENS

MIN_GAIN = 1.03  # a smaller predicted gain may be noise
MIN_DRAFT_GAIN = 1.1  # the same for tokens that have to be drafted: more is estimated, and a wrong estimate costs more
PRIOR_ACCEPTANCE = 0.6
# Wider drafts tried beyond the best so far: if one of 8 sequences gains, the first width that pays may be the fourth.
PATIENCE = 3
READY_DRAFT_FACTOR = 4  # a try is so many times as wide if the proposals exist already
TRY_STEPS = 6  # a proposer that follows hidden states guesses badly until it has seen several
MAX_READ_STEPS = 0.75 * FIRST_ALLOWANCE  # plain steps that a try counts for reading, since no more is ever saved up
DECISION_STEPS = 4  # steps for which a batch keeps its width: choosing it takes 0.1 to 0.2 ms for 64 sequences
# Verifying steps between two measurements of plain steps: few at first, since those of a cold engine mislead.
FIRST_PLAIN_INTERVAL, MAX_PLAIN_INTERVAL = 16, 256
PLAIN_RUN = 6  # consecutive plain steps of a measurement, the first NUM_COLD_STEPS of which are not timed
# After a draft the demo model's plain steps take 1.23, 1.10, 1.03 times as long.
NUM_COLD_STEPS = 2
PLAIN_SAMPLE = 32  # while all steps are plain, one of this many is timed
NEVER = 1 << 30  # steps, if no proposer is to be asked
EXCESS_STEP = 0.03
REFILL_FORGET = 0.9


class TimeCorrection:
    """Keep a running median of actual over predicted time of one proposer's steps. Tokens are not counted: a proposer
    rated too high stays on and is corrected by its acceptance rate; counted here, it would be turned off for good."""

    __slots__ = ("excess",)

    def __init__(self):
        self.excess = 1.0

    def add(self, spent: float, predicted: float) -> None:
        """Move the median by one step up or down, towards this measurement."""
        self.excess += EXCESS_STEP if spent > self.excess * predicted else -EXCESS_STEP

    @property
    def trust(self) -> float:
        """Return predicted over actual time."""
        return 1 / self.excess


class Refill:
    """Estimate how far sequences that end are replaced while others decode: 1 under a steady load, 0 where a batch is
    worked off to its end, so that a sequence that ends early leaves a step that is hardly cheaper."""

    __slots__ = ("rate", "vacant")

    def __init__(self):
        self.rate = 0.0
        self.vacant = 0

    def note_change(self, num_joined: int, num_left: int, num_seqs: int) -> None:
        """Count the sequences that joined and left since the last step; `num_seqs` decode now."""
        self.vacant += num_left
        filled = min(num_joined, self.vacant)
        for _ in range(filled):
            self.rate += (1 - REFILL_FORGET) * (1 - self.rate)
        self.vacant -= filled
        if num_seqs == 0:
            self.rate *= REFILL_FORGET**self.vacant
            self.vacant = 0


class Controller:
    """Decide the widths of an engine's proposals. One per engine; used by the loop's thread alone."""

    def __init__(self, steps_a_call: int = 1):
        """Control an engine that does at most `steps_a_call` steps in one call."""
        self.steps_a_call = steps_a_call
        self.costs = Costs()
        self.refill = Refill()
        self.lately: dict[str, AcceptanceRate] = {}
        self.plan = DraftPlan(0)
        self.step = 0
        self._corrections: dict[tuple[str, int], TimeCorrection] = {}
        self._states: defaultdict[str, ProposerState] = defaultdict(ProposerState)
        self._timed_at = 0  # the last step that was timed
        # Verifying steps since the last timed plain step, by the batch size in powers of two.
        self._since_plain = Counter[int]()
        self._plain_intervals = defaultdict[int, int](lambda: FIRST_PLAIN_INTERVAL)
        self._num_plain = 0  # plain steps since the last verifying one
        self._plain_left = 0  # plain steps still to run in the current measurement

    def prior(self, name: str) -> float:
        """Return the acceptance rate to assume for a sequence that is new to a proposer."""
        lately = self.lately.get(name)
        return lately.rate(PRIOR_ACCEPTANCE) if lately is not None else PRIOR_ACCEPTANCE

    def begin(self, num_seqs: int) -> None:
        """Begin to plan a step of `num_seqs` decoding sequences."""
        self.step += 1
        self.plan = DraftPlan(num_seqs)

    def wants_plain(self, num_seqs: int, is_free: bool = True) -> bool:
        """Return whether this step should be plain, to measure it. `is_free`: a width has to be decided from the
        measurement."""
        bucket, is_known = num_seqs.bit_length(), self.costs.plain_s(num_seqs) is not None
        if self._since_plain[bucket] >= self._plain_intervals[bucket] or (is_free and not is_known):
            self._plain_left = PLAIN_RUN
        return self._plain_left > 0

    def is_resting(self, name: str, num_seqs: int) -> bool:
        """Return whether a proposer is off and not to be asked in this step."""
        return self._states[name].is_resting(self.step, num_seqs)

    def wants_time(self, num_seqs: int) -> bool:
        """Return whether to time a plain step in which no proposer is asked. Reading the clock takes as long as the
        rest."""
        is_due = self.step - self._timed_at >= PLAIN_SAMPLE
        return is_due or self.costs.plain_s(num_seqs) is None or self._plain_left > 0

    def num_plain_steps(self, names: Iterable[str], num_seqs: int, has_fixed: bool) -> int:
        """Return how many steps pass before one of these proposers is asked, the planned step included. `has_fixed`:
        each is asked in every step except those that are measured as plain ones."""
        if self._plain_left > 0:
            return NUM_COLD_STEPS - self._num_plain if self._num_plain < NUM_COLD_STEPS else self._plain_left
        resting = (
            1 if has_fixed else self._states[name].num_resting(self.step, num_seqs, self.steps_a_call) for name in names
        )
        return min(resting, default=NEVER)

    def note_plain_steps(self, num_steps: int) -> None:
        """Record that the planned step, or `num_steps` in its place, passed without proposals."""
        self.step += num_steps - 1
        self._num_plain += num_steps
        self._plain_left = max(0, self._plain_left - num_steps)

    def note_nothing_proposed(self, name: str) -> None:
        """Record that a quick proposer, asked before its width is decided, proposed nothing."""
        self._states[name].rest(self.step, self.plan.num_seqs, True)

    def widths(self, candidates: DraftCandidates) -> list[int]:
        """Return how many tokens to ask for, for each of the candidates of the step that is being planned."""
        own, num_seqs = candidates.acceptance, self.plan.num_seqs
        plain_s = self.costs.plain_s(num_seqs)
        if plain_s is None or not own:
            return [0] * len(own)
        state, prior = self._states[candidates.name], self.prior(candidates.name)
        rates = [acceptance.rate(prior) for acceptance in own]
        if num_seqs <= SMALL_BATCH or not 0 <= self.step - state.decided_at < DECISION_STEPS:
            p_all_accepted = math.prod(acceptance.mean(prior) for acceptance in own)
            state.best = self._best_width(candidates, rates, p_all_accepted, plain_s)
            state.decided_at = self.step
        if state.best:
            best = state.choose_width()
            floor = self._floor(candidates.name, plain_s)
            widths = [
                _deepest(rate, min(best, limit), floor) for rate, limit in zip(rates, candidates.limits, strict=True)
            ]
            for acceptance, width in zip(own, widths, strict=True):
                if width == 0:
                    acceptance.fade()
        else:
            widths = self._try(candidates, state, plain_s)
            state.rest(self.step, num_seqs, candidates.has_drafts)
        self._predict(candidates, rates, widths)
        return widths

    def note_step(self, outcome: StepOutcome) -> None:
        """Record how the planned step went."""
        num_seqs, plan = self.plan.num_seqs, self.plan
        num_made, num_proposed, step_s, draft_s, adaptive, num_steps, is_plain, last, least_made = outcome
        self._timed_at = self.step
        plain_s = self.costs.plain_s(num_seqs)
        if num_proposed:
            self._since_plain[num_seqs.bit_length()] += 1
            self._num_plain = 0
        else:
            self.note_plain_steps(num_steps)
        if num_proposed:
            self.costs.add_verified(last, num_seqs, num_proposed, step_s)
        elif is_plain and self._num_plain - num_steps >= NUM_COLD_STEPS:
            # A call counts as one measurement until there are enough: the first ones, of a cold engine, take twice as
            # long.
            self.costs.add_plain(num_seqs, step_s, 1 if plain_s is None else num_steps)
            self._note_plain_measured(num_seqs.bit_length())
        if plain_s is None:
            return
        spent = (step_s + draft_s if num_proposed else plain_s + draft_s) / plain_s
        predicted_spent = 1 + (self._extra_s(plan) + plan.draft_s) / plain_s
        for name in adaptive:
            state, correction = self._states[name], self._correction(name, num_seqs)
            if num_proposed:
                state.note_worth(self._worth(least_made, num_made / num_seqs) - spent)
            if num_proposed and plan.is_known:
                correction.add(spent, predicted_spent)
                spent = min(spent, predicted_spent / correction.trust)  # the step may have been disturbed
            if state.is_trying:
                gained = (num_made / num_seqs - 1) * (self.refill.rate if num_seqs > 1 else 1.0)
                state.note_try(spent - 1 - gained, num_proposed > 0)

    def _note_plain_measured(self, bucket: int) -> None:
        if self._since_plain[bucket]:  # this is the first step of a run
            self._since_plain[bucket] = 0
            self._plain_intervals[bucket] = min(2 * self._plain_intervals[bucket], MAX_PLAIN_INTERVAL)

    def note_look(self, names: Sequence[str], draft_s: float) -> None:
        """Record the time of asking proposers that proposed nothing in the planned step."""
        if (plain_s := self.costs.plain_s(self.plan.num_seqs)) is not None:
            for name in names:
                self._states[name].note_look(draft_s / plain_s / len(names))

    def note_accepted(self, name: str, acceptance: AcceptanceRate, num_proposed: int, num_accepted: int) -> None:
        """Record how many proposals of the sequence with this `acceptance` were accepted."""
        acceptance.add(num_proposed, num_accepted)
        self.lately.setdefault(name, AcceptanceRate()).add(num_proposed, num_accepted, LATELY_FORGET)

    # ---- private ----

    def _correction(self, name: str, num_seqs: int) -> TimeCorrection:
        return self._corrections.setdefault((name, num_seqs.bit_length()), TimeCorrection())

    def _extra_s(self, plan: DraftPlan) -> float:
        is_known = plan.num_proposals and self.costs.extra_is_known(plan.last)
        return self.costs.extra_s(plan.last, plan.num_seqs, plan.num_proposals) if is_known else 0.0

    def _worth(self, least: float, mean: float) -> float:
        """Return the whole steps saved plus the step itself, where the slowest sequence makes `least` tokens."""
        return least + self.refill.rate * (mean - least)

    def _best_width(
        self, candidates: DraftCandidates, rates: Sequence[float], p_all_accepted: float, plain_s: float
    ) -> int:
        """Return the width with the most tokens per second, 0 if none is better than a plain step by the gain wanted.
        `rates`: chance that a proposal is right, of each sequence; `p_all_accepted`: for every sequence."""
        if not self._is_known(candidates):
            return 0
        gain = MIN_GAIN if candidates.has_drafts else MIN_DRAFT_GAIN
        trust = self._correction(candidates.name, self.plan.num_seqs).trust
        best, best_speed = 0, gain / (plain_s * trust)
        for width, speed in enumerate(self._speeds(candidates, rates, p_all_accepted, plain_s), 1):
            if speed > best_speed:
                best, best_speed = width, speed
            elif best and width >= best + PATIENCE:
                break
        return best

    def _speeds(
        self, candidates: DraftCandidates, rates: Sequence[float], p_all_accepted: float, plain_s: float
    ) -> Iterator[float]:
        """Yield the tokens per second of widths 1, 2, ..., as far as their cost can be predicted. Each sequence
        proposes so many tokens, up to its limit and as long as their chance is above the floor."""
        name, _, limits, has_drafts, num_reads, _, num_left = candidates
        plan = self.plan
        num_seqs, num_proposals = plan.num_seqs, plan.num_proposals
        extra, most, shortest, draft_s = self.costs.extra_curve(name, num_seqs), max(limits), min(limits), 0.0
        if not has_drafts:
            draft, more = self.costs.draft_curve(name, len(rates))
            most = min(most, 2 * draft.largest)
        read_s = self.costs.read_s(name) * num_reads
        fixed_s = plain_s + plan.draft_s
        total, least = plan.others(len(rates))
        total += len(rates)
        chances, tokens, floor = [1.0] * len(rates), [1.0] * len(rates), self._floor(name, plain_s)
        chance_of_all = 1.0
        at_once = 1.0
        for width in range(1, most + 1):
            for index, (rate, limit) in enumerate(zip(rates, limits, strict=True)):
                if width <= limit and (chance := chances[index] * rate) >= floor:
                    chances[index] = chance
                    tokens[index] += chance
                    total += chance
                    num_proposals += 1
            if num_proposals > 2 * extra.largest:
                return
            chance_of_all *= p_all_accepted if width <= shortest else 0.0
            at_once += chance_of_all
            slowest = min(least, *tokens)
            if num_seqs > 1:
                slowest = _of_slowest(slowest, at_once, num_left)
            worth = self._worth(slowest, total / num_seqs)
            if not has_drafts:
                draft_s = more * draft.at(width)
            yield worth / (fixed_s + extra.at(num_proposals) + draft_s + read_s * worth)

    def _predict(self, candidates: DraftCandidates, rates: Sequence[float], widths: Sequence[int]) -> None:
        """Add the proposals of these widths to the plan."""
        plan, drafted = self.plan, [(rate, width) for rate, width in zip(rates, widths, strict=True) if width]
        plan.tokens += [sum(accumulate(repeat(rate, width), mul, initial=1.0)) for rate, width in drafted]
        plan.num_proposals += sum(width for _, width in drafted)
        if drafted:
            plan.last = candidates.name
        if drafted and not self._is_known(candidates):
            plan.is_known = False
        elif drafted and not candidates.has_drafts:
            plan.draft_s += self.costs.draft_s(candidates.name, len(drafted), max(width for _, width in drafted))

    def _try(self, candidates: DraftCandidates, state: ProposerState, plain_s: float) -> list[int]:
        """Return the widths of a try, all 0 if the allowance does not pay for one. It takes the sequences that need the
        least reading and are the least known, the same ones until it ends."""
        own = candidates.acceptance
        read = self.costs.read_s(candidates.name) / plain_s
        reads = [min(read * num, MAX_READ_STEPS) for num in candidates.num_unread] or [0.0] * len(own)
        order = sorted(range(len(own)), key=lambda index: (reads[index], own[index].trials))
        widths, width = [0] * len(own), state.width * (READY_DRAFT_FACTOR if candidates.has_drafts else 1)
        if not state.is_trying:
            if not state.can_pay(self.step, reads[order[0]] + self._price(candidates, 1, width, plain_s)):
                return widths
            state.num_to_try = 1 if candidates.has_drafts else TRY_STEPS
        chosen = [index for index, acceptance in enumerate(own) if acceptance in state.tried]
        if not chosen:
            num = 1
            while num < len(own) and state.can_pay(
                self.step,
                sum(reads[index] for index in order[: 2 * num]) + self._price(candidates, 2 * num, width, plain_s),
            ):
                num *= 2
            chosen = order[:num]
            state.tried = [own[index] for index in chosen]
        for index in chosen:
            widths[index] = min(width, candidates.limits[index])
        return widths

    def _price(self, candidates: DraftCandidates, num: int, width: int, plain_s: float) -> float:
        """Return what a try with `num` sequences costs beyond a plain step, in plain steps."""
        if not self._is_known(candidates):
            return 0.5 + 0.1 * num * width
        draft_s = 0.0 if candidates.has_drafts else self.costs.draft_s(candidates.name, num, width)
        return (self.costs.extra_s(candidates.name, self.plan.num_seqs, num * width) + draft_s) / plain_s

    def _is_known(self, candidates: DraftCandidates) -> bool:
        """Return whether the cost of these proposals can be predicted."""
        name = candidates.name
        return self.costs.extra_is_known(name) and (candidates.has_drafts or self.costs.draft_is_known(name))

    def _floor(self, name: str, plain_s: float) -> float:
        """Return the chance below which one more proposal takes longer to verify than it saves; 0 where the batch waits
        for the sequence that gains least."""
        if not self.refill.rate or not self.costs.extra_is_known(name):
            return 0.0
        num_seqs = self.plan.num_seqs
        return self.refill.rate * self.costs.extra_curve(name, num_seqs).slope * num_seqs / plain_s


def _of_slowest(tokens: float, at_once: float, num_left: int) -> float:
    """Return the tokens per step of the slowest sequence, for which a batch waits until `num_left` tokens are made. In
    a single step that is `at_once`, set by the first wrong proposal; over many steps chance evens out and it approaches
    `tokens`, set by the lowest acceptance rate."""
    return tokens - (tokens - min(tokens, at_once)) / math.sqrt(max(1.0, num_left / tokens))


def _deepest(rate: float, width: int, floor: float) -> int:
    """Return the number of positions whose chance of being reached and right is at least the floor."""
    chance = 1.0
    for position in range(width):
        chance *= rate
        if chance < floor:
            return position
    return width


def limit_of(num_left: int, budget: int) -> int:
    """Return how many proposals can be of use: a step yields one token more than it accepts."""
    return max(0, min(MAX_DRAFT_TOKENS, num_left - 1, budget))
