"""How many tokens are proposed for whom: what it is expected to bring against what it costs, both as measured.

    brings   a proposal at position j of a sequence is right with about a^j, where a is the sequence's own acceptance,
             forgetting; a sequence that is new begins with what its proposer had lately
    costs    seconds of a plain step, of a verifying step beyond it by its proposals, of a draft by its width: each
             measured by this engine from its own steps, by the number of sequences (powers of two), see costs.py
    trust    what steps with a proposer came to against what was foreseen of them, by its name and the batch: what the
             two above leave out (prompts that a draft reads, looking in vain, hopes) ends in this factor
    worth    tokens that all sequences gain save whole steps. What one gains beyond the one that gains least only
             frees its place earlier: that counts as far as places are filled again, see Refill

Per step the width is chosen that is worth most per second, and none where that is not GAIN times plain. What is off is
tried now and then, out of an allowance that grows with the time of plain steps; what is on and has lost of late pays
its losses out of the same, and is off when nothing is left. So leaving it on costs ALLOWANCE at most, whatever the text
and the load.
"""

import math
from collections.abc import Iterable, Sequence

from baton.engine.config import MAX_DRAFT_TOKENS
from baton.engine.speculation.costs import OUTLIER, Costs

GAIN = 1.03  # below it a measured gain may be noise
ACCEPT_FORGET, LATELY_FORGET = 0.96, 0.995
PRIOR_TRIALS = 2.0  # weight of the proposer's lately against the sequence's own
PRIOR_ACCEPTANCE = 0.6
HOPE = 0.2  # of 1 / sqrt(trials), whose standard deviation is at most 0.5 of it
FADE = 0.995  # of a sequence's own, per step in which others are asked and it is not: it is looked at again
PATIENCE = 3  # wider drafts looked at beyond the best one
ALLOWANCE = 0.004  # of the time of plain steps, for trying what does not pay as far as is known
FIRST_ALLOWANCE = 4.0  # plain steps; nor is more ever saved up
DISTURBED = 4.0  # plain steps: what a try took beyond that was no fault of it
TRIAL_WIDTHS = (4, 1, 3)  # in turn: of one width alone no slope can be told
LOOK_INTERVAL = 16  # steps between two looks at what is off: sequences come and go
PLAIN_INTERVAL = 256  # verifying steps after which one plain step is measured again
FIXED_INTERVAL = 16  # the same while there is no measurement yet, where every request has a width of its own
TRUST_FORGET = 0.99
TRUST_STEPS = 6.0  # weight of full trust at the beginning
RELAX = 0.98  # what of a distrust is left after a try
REFILL_FORGET = 0.9


class Acceptance:
    """Of one sequence, or of all that a proposer served: the chance that a proposal is right if those before are."""

    __slots__ = ("accepted", "trials")

    def __init__(self):
        self.accepted = self.trials = 0.0

    def add(self, num_proposed: int, num_accepted: int, forget: float = ACCEPT_FORGET) -> None:
        """Of the proposals behind the first wrong one nothing is known."""
        self.accepted = forget * self.accepted + num_accepted
        self.trials = forget * self.trials + min(num_accepted + 1, num_proposed)

    def fade(self) -> None:
        self.accepted *= FADE
        self.trials *= FADE

    def rate(self, prior: float) -> float:
        """Hopeful where little is known: who is thought too good is tried and found out, who is thought bad is not."""
        trials = self.trials + PRIOR_TRIALS
        return min(1.0, (self.accepted + PRIOR_TRIALS * prior) / trials + HOPE / math.sqrt(trials))


class Account:
    """Of the steps that one proposer was asked in: tokens a sequence and time, in plain steps, as foreseen and as they
    came out."""

    __slots__ = ("made", "spent", "foreseen_made", "foreseen_spent")

    def __init__(self):
        self.made = self.spent = self.foreseen_made = self.foreseen_spent = TRUST_STEPS

    def add(self, made: float, spent: float, foreseen_made: float, foreseen_spent: float) -> None:
        spent = min(spent, OUTLIER * foreseen_spent)
        self.made = TRUST_FORGET * self.made + made
        self.spent = TRUST_FORGET * self.spent + spent
        self.foreseen_made = TRUST_FORGET * self.foreseen_made + foreseen_made
        self.foreseen_spent = TRUST_FORGET * self.foreseen_spent + foreseen_spent

    def relax(self) -> None:
        """It was not on for a while: some trust comes back."""
        for name in self.__slots__:
            setattr(self, name, RELAX * getattr(self, name) + 1 - RELAX)

    @property
    def gain(self) -> float:
        return self.made / self.spent

    @property
    def trust(self) -> float:
        return self.gain * self.foreseen_spent / self.foreseen_made


class Refill:
    """Whether the places of sequences that end are filled again while others decode: 1 under a steady load, 0 where a
    batch is worked off to its end. Then a sequence that is done early leaves a step that is hardly cheaper."""

    __slots__ = ("rate", "vacant")

    def __init__(self):
        self.rate = 0.0
        self.vacant = 0

    def changed(self, num_joined: int, num_left: int, num_seqs: int) -> None:
        """Since the step before; `num_seqs` decode now."""
        self.vacant += num_left
        filled = min(num_joined, self.vacant)
        for _ in range(filled):
            self.rate += (1 - REFILL_FORGET) * (1 - self.rate)
        self.vacant -= filled
        if num_seqs == 0:
            self.rate *= REFILL_FORGET**self.vacant
            self.vacant = 0


class Tries:
    """Of one proposer: the allowance, and the try that goes on. It lasts until something was proposed: a model may have
    a prompt to read first, and prompt lookup a match to wait for."""

    __slots__ = ("allowance_s", "count", "is_trying", "waited", "num_seqs")

    def __init__(self, plain_s: float):
        self.allowance_s = FIRST_ALLOWANCE * plain_s
        self.count = 0
        self.is_trying = False
        self.waited = 0
        self.num_seqs = 0  # for so many it was found to be off; 0: it is on

    def is_resting(self, num_seqs: int) -> bool:
        """Of every step: whether nothing is to be decided now."""
        if self.is_trying or num_seqs.bit_length() != self.num_seqs.bit_length():
            return False
        self.waited += 1
        return bool(self.waited % LOOK_INTERVAL)

    @property
    def width(self) -> int:
        return TRIAL_WIDTHS[self.count % len(TRIAL_WIDTHS)]

    def begin(self) -> None:
        self.count += 1
        self.is_trying = True

    def earn(self, plain_s: float) -> None:
        self.allowance_s = min(self.allowance_s + ALLOWANCE * plain_s, FIRST_ALLOWANCE * plain_s)

    def pay(self, seconds: float, plain_s: float) -> None:
        """What a step lost, or gained."""
        self.allowance_s = min(self.allowance_s - min(seconds, DISTURBED * plain_s), FIRST_ALLOWANCE * plain_s)


class Plan:
    """What a step is foreseen to come to, proposer after proposer."""

    __slots__ = ("num_seqs", "tokens", "num_proposals", "draft_s")

    def __init__(self, num_seqs: int):
        self.num_seqs = num_seqs
        self.tokens: list[float] = []  # of the sequences that something is proposed for
        self.num_proposals = 0
        self.draft_s = 0.0

    def rest(self, num: int) -> tuple[float, float]:
        """(sum, least) of the tokens of all sequences but `num` that are being planned."""
        num_plain = self.num_seqs - num - len(self.tokens)
        least = 1.0 if num_plain else min(self.tokens, default=math.inf)
        return num_plain + sum(self.tokens), least

    @property
    def made(self) -> float:
        """Tokens a sequence."""
        return (self.num_seqs - len(self.tokens) + sum(self.tokens)) / self.num_seqs


class Controller:
    """One per engine. Belongs to the loop's thread."""

    def __init__(self):
        self.costs = Costs()
        self.refill = Refill()
        self.lately: dict[str, Acceptance] = {}
        self.plan = Plan(0)
        self._accounts: dict[tuple[str, int], Account] = {}
        self._tries: dict[str, Tries] = {}
        self._since_plain = 0

    def prior(self, name: str) -> float:
        """The acceptance of a sequence that is new to a proposer."""
        lately = self.lately.get(name)
        return lately.rate(PRIOR_ACCEPTANCE) if lately is not None else PRIOR_ACCEPTANCE

    def begin(self, num_seqs: int) -> None:
        """A step of so many decoding sequences is planned."""
        self.plan = Plan(num_seqs)

    def wants_plain(self, num_seqs: int, is_free: bool = True) -> bool:
        """Whether this step should be plain, to be measured. `is_free`: somebody's width is to be decided from it."""
        if self.costs.plain_s(num_seqs) is None:
            return is_free or self._since_plain >= FIXED_INTERVAL
        return self._since_plain >= PLAIN_INTERVAL

    def is_resting(self, name: str, num_seqs: int) -> bool:
        """Of every step: whether a proposer is off, and not to be asked now."""
        tries = self._tries.get(name)
        return tries is not None and tries.is_resting(num_seqs)

    def may_look(self, name: str, num_seqs: int) -> bool:
        """Of a proposer that is asked first and decided about when its proposals are there: whether to ask it now."""
        tries = self._tries.get(name)
        return tries is None or tries.allowance_s > 0 or self._account(name, num_seqs).gain >= 1

    def widths(
        self, name: str, num_seqs: int, own: Sequence[Acceptance], limits: Sequence[int], is_drafted: bool = False
    ) -> list[int]:
        """For each of the sequences that may speculate, among `num_seqs` in the step, how many tokens to ask for.
        `own`: their acceptance; `limits`: what they have room for; `is_drafted`: so many proposals are there, and what
        they took is spent."""
        plain_s = self.costs.plain_s(num_seqs)
        if plain_s is None or not own:
            return [0] * len(own)
        tries = self._tries_of(name, plain_s)
        prior = self.prior(name)
        rates = [acceptance.rate(prior) for acceptance in own]
        best = self._best_width(name, rates, limits, plain_s, is_drafted)
        if best == 0 or (tries.allowance_s <= 0 and self._account(name, num_seqs).gain < 1):
            tries.num_seqs = num_seqs if self.costs.is_known(name) else 0
            widths = self._try(name, tries, own, limits, plain_s)
        else:
            tries.num_seqs, tries.is_trying = 0, False
            floor = self._floor(plain_s)
            widths = [_deepest(rate, min(best, limit), floor) for rate, limit in zip(rates, limits, strict=True)]
            for acceptance, width in zip(own, widths, strict=True):
                if width == 0:
                    acceptance.fade()
        self._foresee(name, rates, widths, is_drafted)
        return widths

    def passed(self, num_made: int, num_proposed: int, step_s: float, draft_s: float, asked: Iterable[str]) -> None:
        """The planned step has passed, decoding alone: `num_made` tokens in `step_s`, without its drafts."""
        num_seqs, plan = self.plan.num_seqs, self.plan
        plain_s = self.costs.plain_s(num_seqs)
        self.costs.add_step(num_seqs, num_proposed, step_s)
        self._since_plain = self._since_plain + 1 if num_proposed else 0
        if plain_s is None:
            return
        for tries in self._tries.values():
            tries.earn(plain_s)
        if num_proposed:
            seconds = step_s + draft_s
            foreseen = plan.made, 1 + self._extra_s(num_seqs, plan.num_proposals) / plain_s + plan.draft_s / plain_s
        else:
            seconds, foreseen = plain_s + draft_s, (1.0, 1.0)
        for name in asked:
            account, tries = self._account(name, num_seqs), self._tries_of(name, plain_s)
            if tries.is_trying:
                tries.pay(max(0.0, seconds - plain_s), plain_s)
                tries.is_trying = not num_proposed and tries.allowance_s > 0
                continue  # a try is hopeful by intent: nothing is learned from it about what is foreseen
            account.add(num_made / num_seqs, seconds / plain_s, *foreseen)
            if account.gain < 1:
                tries.pay(seconds - plain_s * num_made / num_seqs, plain_s)

    def judged(self, name: str, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """What became of a sequence's proposals; `acceptance` is its own."""
        acceptance.add(num_proposed, num_accepted)
        self.lately.setdefault(name, Acceptance()).add(num_proposed, num_accepted, LATELY_FORGET)

    # ---- private ----

    def _account(self, name: str, num_seqs: int) -> Account:
        return self._accounts.setdefault((name, num_seqs.bit_length()), Account())

    def _tries_of(self, name: str, plain_s: float) -> Tries:
        tries = self._tries.get(name)
        if tries is None:
            tries = self._tries[name] = Tries(plain_s)
        return tries

    def _extra_s(self, num_seqs: int, num_proposals: int) -> float:
        return self.costs.extra_s(num_seqs, num_proposals) if num_proposals and self.costs.extra_is_known else 0.0

    def _best_width(self, name, rates, limits, plain_s, is_drafted) -> int:
        """The width that is worth most per second, all sequences at that width, at their limit or above the floor."""
        if not self.costs.is_known(name):
            return 0
        plan, refill = self.plan, self.refill.rate
        num_seqs = plan.num_seqs
        trust = min(1.0, self._account(name, num_seqs).trust)
        best, best_speed = 0, 0.0
        total, least = plan.rest(len(rates))
        total += len(rates)
        num_proposals = plan.num_proposals
        chances, tokens, floor, num_asked = [1.0] * len(rates), [1.0] * len(rates), self._floor(plain_s), 0
        for width in range(1, max(limits) + 1):
            for index, (rate, limit) in enumerate(zip(rates, limits, strict=True)):
                if width <= limit and (chance := chances[index] * rate) >= floor:
                    chances[index] = chance
                    tokens[index] += chance
                    total += chance
                    num_proposals += 1
                    num_asked += width == 1
            if num_asked == 0:
                return 0
            extra_s = self.costs.extra_s(num_seqs, num_proposals) + plan.draft_s
            if not is_drafted:
                extra_s += self.costs.draft_s(name, num_asked, width)
            slowest = min(least, *tokens)
            worth = slowest + refill * (total / num_seqs - slowest)
            speed = trust * worth / (plain_s + extra_s)
            if speed > best_speed:
                best, best_speed = width, speed
            elif width >= best + PATIENCE:
                break
        return best if best_speed > GAIN / plain_s else 0

    def _foresee(self, name: str, rates: Sequence[float], widths: Sequence[int], is_drafted: bool) -> None:
        plan, asked = self.plan, [(rate, width) for rate, width in zip(rates, widths, strict=True) if width]
        plan.tokens += [sum(rate**place for place in range(width + 1)) for rate, width in asked]
        plan.num_proposals += sum(width for _, width in asked)
        if asked and not is_drafted and self.costs.is_known(name):
            plan.draft_s += self.costs.draft_s(name, len(asked), max(width for _, width in asked))

    def _try(self, name, tries, own, limits, plain_s) -> list[int]:
        """As many sequences as the allowance pays for, those least known first; none where it does not pay for one."""
        widths, width = [0] * len(own), tries.width
        if not tries.is_trying:
            if tries.allowance_s <= 0 or self._price(name, 1, width, plain_s) > tries.allowance_s:
                return widths
            tries.begin()
            self._account(name, self.plan.num_seqs).relax()
        num = 1
        while num < len(own) and self._price(name, 2 * num, width, plain_s) <= tries.allowance_s:
            num *= 2
        for index in sorted(range(len(own)), key=lambda index: own[index].trials)[:num]:
            widths[index] = min(width, limits[index])
        return widths

    def _price(self, name: str, num: int, width: int, plain_s: float) -> float:
        """Seconds that a try with so many sequences takes beyond a plain step."""
        if not self.costs.is_known(name):
            return plain_s * (0.5 + 0.1 * num * width)
        return self.costs.extra_s(self.plan.num_seqs, num * width) + self.costs.draft_s(name, num, width)

    def _floor(self, plain_s: float) -> float:
        """The chance below which one more proposal takes longer to verify than it saves; none where the batch waits for
        the sequence that gains least."""
        num_seqs = self.plan.num_seqs
        more_s = self.costs.extra_s(num_seqs, num_seqs + 1) - self.costs.extra_s(num_seqs, num_seqs)
        return self.refill.rate * more_s * num_seqs / plain_s


def _deepest(rate: float, width: int, floor: float) -> int:
    """Positions whose chance of being reached and right is above the floor."""
    chance = 1.0
    for position in range(width):
        chance *= rate
        if chance < floor:
            return position
    return width


def limit_of(num_left: int, num_free_positions: int, budget: int) -> int:
    """Proposals that can be of use: the step gives one token more than it accepts."""
    return max(0, min(MAX_DRAFT_TOKENS, num_left - 1, num_free_positions - 1, budget))
