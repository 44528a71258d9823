"""Decide how many tokens are proposed for each sequence: expected gain against cost, both measured.

    brings   a proposal at position j of a sequence is right with about a^j, where a is the sequence's own acceptance,
             forgetting; a sequence that is new begins with what its proposer had lately
    costs    seconds of a plain step, of a verifying step beyond it by its proposals and proposer, of a draft by its
             width: each measured by this engine from its own steps, by the number of sequences (powers of two), see
             costs.py; plain steps again and again, soon at first: an engine that begins cold takes three times as long
    trust    what steps with a proposer took against what was predicted of them, by its name and the batch: what the
             costs leave out (prompts that a draft reads, hidden states that are kept) ends in this factor
    worth    tokens that all sequences gain save whole steps. What one gains beyond the one that gains least only
             frees its place earlier: that counts as far as places are filled again, see Refill
    looks    one for what costs next to nothing follows soon on another as long as they gain more than they take

Per step the width is chosen that is worth most per second, and none where that is not GAIN times plain (DRAFT_GAIN
where it is to be drafted). What is off is looked at again every LOOK_INTERVAL steps, and tried out of an allowance that
grows with the time of plain steps, see proposer_state.py. Of what costs next to nothing the guesses are judged by what
came, verified or not. So leaving it on costs little more than ALLOWANCE, whatever the text and the load.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul

from baton.engine.speculation.control.acceptance import LATELY_FORGET, AcceptanceRate
from baton.engine.speculation.control.costs import Costs
from baton.engine.speculation.control.proposer_state import FIRST_ALLOWANCE, SMALL_BATCH, ProposerState
from baton.protocol import MAX_DRAFT_TOKENS

GAIN = 1.03  # below it a predicted gain may be noise
DRAFT_GAIN = 1.1  # the same where proposals have to be drafted: more is guessed, and more is lost by a wrong guess
PRIOR_ACCEPTANCE = 0.6
# wider drafts looked at beyond the best one; where one of 8 sequences gains, the first width that pays may be the
# fourth
PATIENCE = 3
READY_DRAFT_FACTOR = 4  # times as wide where the proposals are there anyway
TRY_STEPS = 6  # what follows hidden states guesses badly while it has seen few
DEAREST_READ = 0.75 * FIRST_ALLOWANCE  # plain steps that a try counts for reading, as no more is ever saved up
DECIDED_FOR = 4  # steps of a batch: for 64 sequences the width takes 0.1 to 0.2 ms to choose
FIRST_INTERVAL = 16  # verifying steps after which plain ones are measured again: ever more, a cold engine's mislead
PLAIN_INTERVAL = 256  # the most of them
PLAIN_RUN = 6  # running, behind COLD ones
COLD = 2  # plain steps that are not measured: after a draft the demo model's take 1.23, 1.10, 1.03 times as long
PLAIN_SAMPLE = 32  # where all are plain one of this many is measured
NEVER = 1 << 30  # steps: nobody is to be asked
EXCESS_STEP = 0.03
REFILL_FORGET = 0.9


class TimeCorrection:
    """Keep a running median of actual over predicted time of one proposer's steps. Tokens are not counted: a proposer
    rated too high stays on and is corrected by its acceptance rate; counted here, it would be turned off for good."""

    __slots__ = ("excess",)

    def __init__(self):
        self.excess = 1.0

    def add(self, spent: float, predicted: float) -> None:
        self.excess += EXCESS_STEP if spent > self.excess * predicted else -EXCESS_STEP

    @property
    def trust(self) -> float:
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


class DraftPlan:
    """Predict the time and the tokens of a step, to which one proposer after the other adds its part."""

    __slots__ = ("num_seqs", "tokens", "num_proposals", "draft_s", "last", "is_known")

    def __init__(self, num_seqs: int):
        self.num_seqs = num_seqs
        self.tokens: list[float] = []  # expected, for each sequence that has proposals
        self.num_proposals = 0
        self.draft_s = 0.0
        self.last = ""  # the last proposer whose proposals are in the step
        self.is_known = True  # whether the time can be predicted

    def others(self, num: int) -> tuple[float, float]:
        """Return (sum, least) of the expected tokens of all sequences but the `num` that are being planned."""
        num_plain = self.num_seqs - num - len(self.tokens)
        least = 1.0 if num_plain else min(self.tokens, default=math.inf)
        return num_plain + sum(self.tokens), least


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
        self._plain_intervals = defaultdict[int, int](lambda: FIRST_INTERVAL)
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
            return COLD - self._num_plain if self._num_plain < COLD else self._plain_left
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

    def widths(
        self, name: str, num_seqs: int, own: Sequence[AcceptanceRate], limits: Sequence[int], has_drafts: bool = False,
        num_reads: float = 0.0, num_unread: Sequence[int] = (), num_left: int = 1,
    ) -> list[int]:  # fmt: skip
        """Return how many tokens to ask for, for each sequence that may speculate among the `num_seqs` of the step.
        `own`: their acceptance; `limits`: their room for tokens; `has_drafts`: the proposals exist already and cost no
        further time; `num_reads`: tokens the proposer must read first, per token that the sequences are expected to
        make; `num_unread`: such tokens of each sequence, empty for none; `num_left`: tokens expected of the longest
        sequence."""
        plain_s = self.costs.plain_s(num_seqs)
        if plain_s is None or not own:
            return [0] * len(own)
        state, prior = self._states[name], self.prior(name)
        rates = [acceptance.rate(prior) for acceptance in own]
        if num_seqs <= SMALL_BATCH or not 0 <= self.step - state.decided_at < DECIDED_FOR:
            p_all_accepted = math.prod(acceptance.mean(prior) for acceptance in own)
            state.best = self._best_width(name, rates, p_all_accepted, limits, plain_s, has_drafts, num_reads, num_left)
            state.decided_at = self.step
        if state.best:
            best = state.choose_width()
            floor = self._floor(name, plain_s)
            widths = [_deepest(rate, min(best, limit), floor) for rate, limit in zip(rates, limits, strict=True)]
            for acceptance, width in zip(own, widths, strict=True):
                if width == 0:
                    acceptance.fade()
        else:
            read = self.costs.read_s(name) / plain_s
            reads = [min(read * num, DEAREST_READ) for num in num_unread] or [0.0] * len(own)
            widths = self._try(name, state, own, limits, plain_s, has_drafts, reads)
            state.rest(self.step, num_seqs, has_drafts)
        self._predict(name, rates, widths, has_drafts)
        return widths

    def note_step(
        self, num_made: int, num_proposed: int, step_s: float, draft_s: float, adaptive: Iterable[str], num_steps: int = 1,
        is_plain: bool = True, last: str = "", least_made: int = 1,
    ) -> None:  # fmt: skip
        """Record the planned step, which only decoded: `num_made` tokens in `step_s`, the time of drafting excluded.
        `num_steps`: without proposals, so many steps passed, each with as many tokens in as much time; `is_plain`: it
        ran as plain steps do; `last`: the last proposer whose proposals it verified; `least_made`: tokens of the
        sequence with the fewest."""
        num_seqs, plan = self.plan.num_seqs, self.plan
        self._timed_at = self.step
        plain_s = self.costs.plain_s(num_seqs)
        if num_proposed:
            self._since_plain[num_seqs.bit_length()] += 1
            self._num_plain = 0
        else:
            self.note_plain_steps(num_steps)
        if num_proposed:
            self.costs.add_verified(last, num_seqs, num_proposed, step_s)
        elif is_plain and self._num_plain - num_steps >= COLD:
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
            self._plain_intervals[bucket] = min(2 * self._plain_intervals[bucket], PLAIN_INTERVAL)

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
        self, name: str, rates: Sequence[float], p_all_accepted: float, limits: Sequence[int], plain_s: float, has_drafts: bool,
        num_reads: float, num_left: int,
    ) -> int:  # fmt: skip
        """Return the width with the most tokens per second; each sequence proposes so many, up to its limit and down to
        the floor. `p_all_accepted`: the chance that a proposal is right for every sequence."""
        if not self._is_known(name, has_drafts):
            return 0
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
        gain = GAIN if has_drafts else DRAFT_GAIN
        best, best_speed = 0, gain / (plain_s * self._correction(name, num_seqs).trust)
        chances, tokens, floor = [1.0] * len(rates), [1.0] * len(rates), self._floor(name, plain_s)
        chance_of_all = 1.0
        at_once = 1.0 if num_seqs > 1 else math.inf  # a lone sequence is itself the slowest
        for width in range(1, most + 1):
            for index, (rate, limit) in enumerate(zip(rates, limits, strict=True)):
                if width <= limit and (chance := chances[index] * rate) >= floor:
                    chances[index] = chance
                    tokens[index] += chance
                    total += chance
                    num_proposals += 1
            if num_proposals > 2 * extra.largest:
                break
            chance_of_all *= p_all_accepted if width <= shortest else 0.0
            at_once += chance_of_all
            worth = self._worth(_of_slowest(min(least, *tokens), at_once, num_left), total / num_seqs)
            if not has_drafts:
                draft_s = more * draft.at(width)
            speed = worth / (fixed_s + extra.at(num_proposals) + draft_s + read_s * worth)
            if speed > best_speed:
                best, best_speed = width, speed
            elif best and width >= best + PATIENCE:
                break
        return best

    def _predict(self, name: str, rates: Sequence[float], widths: Sequence[int], has_drafts: bool) -> None:
        plan, drafted = self.plan, [(rate, width) for rate, width in zip(rates, widths, strict=True) if width]
        plan.tokens += [sum(accumulate(repeat(rate, width), mul, initial=1.0)) for rate, width in drafted]
        plan.num_proposals += sum(width for _, width in drafted)
        if drafted:
            plan.last = name
        if drafted and not self._is_known(name, has_drafts):
            plan.is_known = False
        elif drafted and not has_drafts:
            plan.draft_s += self.costs.draft_s(name, len(drafted), max(width for _, width in drafted))

    def _try(
        self, name: str, state: ProposerState, own: Sequence[AcceptanceRate], limits: Sequence[int], plain_s: float,
        has_drafts: bool, reads: Sequence[float],
    ) -> list[int]:  # fmt: skip
        """Return the widths of a try, all 0 where the allowance does not pay for one. It takes the sequences that need
        the least reading and are the least known, the same ones until it ends. `reads`: the time to read each, in plain
        steps."""
        order = sorted(range(len(own)), key=lambda index: (reads[index], own[index].trials))
        widths, width = [0] * len(own), state.width * (READY_DRAFT_FACTOR if has_drafts else 1)
        if not state.is_trying:
            if not state.can_pay(self.step, reads[order[0]] + self._price(name, 1, width, plain_s, has_drafts)):
                return widths
            state.num_to_try = 1 if has_drafts else TRY_STEPS
        chosen = [index for index, acceptance in enumerate(own) if acceptance in state.tried]
        if not chosen:
            num = 1
            while num < len(own) and state.can_pay(
                self.step,
                sum(reads[index] for index in order[: 2 * num])
                + self._price(name, 2 * num, width, plain_s, has_drafts),
            ):
                num *= 2
            chosen = order[:num]
            state.tried = [own[index] for index in chosen]
        for index in chosen:
            widths[index] = min(width, limits[index])
        return widths

    def _price(self, name: str, num: int, width: int, plain_s: float, has_drafts: bool) -> float:
        """Return what a try with `num` sequences costs beyond a plain step, in plain steps."""
        if not self._is_known(name, has_drafts):
            return 0.5 + 0.1 * num * width
        draft_s = 0.0 if has_drafts else self.costs.draft_s(name, num, width)
        return (self.costs.extra_s(name, self.plan.num_seqs, num * width) + draft_s) / plain_s

    def _is_known(self, name: str, has_drafts: bool) -> bool:
        return self.costs.extra_is_known(name) and (has_drafts or self.costs.draft_is_known(name))

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
