"""How many tokens are proposed for whom: what it is expected to bring against what it costs, both as measured.

    brings   a proposal at position j of a sequence is right with about a^j, where a is the sequence's own acceptance,
             forgetting; a sequence that is new begins with what its proposer had lately
    costs    seconds of a plain step, of a verifying step beyond it by its proposals, of a draft by its width: each
             measured by this engine from its own steps, by the number of sequences (powers of two), see costs.py

Per step the width is chosen that makes the most tokens per second, and none where that is not GAIN times plain. What
is off is tried now and then, out of an allowance that grows with the time of plain steps: so leaving it on costs next
to nothing, whatever the text and the load.
"""

import math
from collections.abc import Sequence

from baton.engine.config import MAX_DRAFT_TOKENS
from baton.engine.speculation.costs import Costs

GAIN = 1.03  # below it a measured gain may be noise
ACCEPT_FORGET, LATELY_FORGET = 0.96, 0.995
PRIOR_TRIALS = 2.0  # weight of the proposer's lately against the sequence's own
PRIOR_ACCEPTANCE = 0.6
HOPE = 0.2  # of 1 / sqrt(trials), whose standard deviation is at most 0.5 of it
FADE = 0.995  # of a sequence's own, per step in which others are asked and it is not: it is looked at again
PATIENCE = 3  # wider drafts looked at beyond the best one
ALLOWANCE = 0.004  # of the time of plain steps, for trying what does not pay as far as is known
FIRST_ALLOWANCE = 8.0  # plain steps
TRIAL_WIDTHS = (4, 1, 3)  # in turn: of one width alone no slope can be told
LOOK_INTERVAL = 16  # steps between two looks at what is off: sequences come and go
PLAIN_INTERVAL = 256  # verifying steps after which one plain step is measured again


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


class Tries:
    """Of one proposer: the allowance, and the try that goes on. It lasts until something was proposed: a model may have
    a prompt to read first, and prompt lookup a match to wait for."""

    __slots__ = ("allowance_s", "count", "is_trying", "waited", "num_seqs")

    def __init__(self):
        self.allowance_s: float | None = None  # None: not begun
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


class Controller:
    """One per engine. Belongs to the loop's thread."""

    def __init__(self):
        self.costs = Costs()
        self.lately: dict[str, Acceptance] = {}
        self._tries: dict[str, Tries] = {}
        self._since_plain = 0

    def prior(self, name: str) -> float:
        """The acceptance of a sequence that is new to a proposer."""
        lately = self.lately.get(name)
        return lately.rate(PRIOR_ACCEPTANCE) if lately is not None else PRIOR_ACCEPTANCE

    def wants_plain(self, num_seqs: int) -> bool:
        """Whether this step should be plain, to be measured."""
        return self.costs.plain_s(num_seqs) is None or self._since_plain >= PLAIN_INTERVAL

    def is_resting(self, name: str, num_seqs: int) -> bool:
        """Of every step: whether a proposer is off, and not to be asked now."""
        tries = self._tries.get(name)
        return tries is not None and tries.is_resting(num_seqs)

    def widths(self, name: str, num_seqs: int, own: Sequence[Acceptance], limits: Sequence[int]) -> list[int]:
        """For each of the sequences that may speculate, among `num_seqs` in the step, how many tokens to ask for.
        `own`: their acceptance; `limits`: what they have room for."""
        plain_s = self.costs.plain_s(num_seqs)
        if plain_s is None or not own:
            return [0] * len(own)
        tries = self._tries.setdefault(name, Tries())
        if tries.allowance_s is None:
            tries.allowance_s = FIRST_ALLOWANCE * plain_s
        prior = self.prior(name)
        rates = [acceptance.rate(prior) for acceptance in own]
        best = self._best_width(name, num_seqs, rates, limits, plain_s)
        if best == 0:
            tries.num_seqs = num_seqs if self.costs.is_known(name) else 0
            return self._try(name, tries, num_seqs, own, limits, plain_s)
        tries.num_seqs, tries.is_trying = 0, False
        floor = self._floor(num_seqs, plain_s, len(rates) * best)
        widths = [_deepest(rate, min(best, limit), floor) for rate, limit in zip(rates, limits, strict=True)]
        for acceptance, width in zip(own, widths, strict=True):
            if width == 0:
                acceptance.fade()
        return widths

    def passed(self, num_seqs: int, num_proposed: int, step_s: float, draft_s: float) -> None:
        """A step of decoding alone has passed, `step_s` without its drafts."""
        plain_s = self.costs.plain_s(num_seqs)
        self.costs.add_step(num_seqs, num_proposed, step_s)
        self._since_plain = self._since_plain + 1 if num_proposed else 0
        if plain_s is None:
            return
        for tries in self._tries.values():
            tries.allowance_s += ALLOWANCE * plain_s
            if tries.is_trying:
                spent_s = draft_s + (step_s - plain_s if num_proposed else 0.0)
                tries.allowance_s -= min(max(0.0, spent_s), 2 * plain_s)  # more was no fault of the try
                tries.is_trying = not num_proposed and tries.allowance_s > 0

    def judged(self, name: str, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """What became of a sequence's proposals; `acceptance` is its own."""
        acceptance.add(num_proposed, num_accepted)
        self.lately.setdefault(name, Acceptance()).add(num_proposed, num_accepted, LATELY_FORGET)

    # ---- private ----

    def _best_width(self, name, num_seqs, rates, limits, plain_s) -> int:
        """The width with the most tokens per second, all sequences at that width or at their limit."""
        best, best_speed = 0, GAIN * num_seqs / plain_s
        if not self.costs.is_known(name):
            return 0
        tokens, num_proposals = float(num_seqs), 0
        chances = [1.0] * len(rates)
        for width in range(1, max(limits) + 1):
            for index, (rate, limit) in enumerate(zip(rates, limits, strict=True)):
                if width <= limit:
                    chances[index] *= rate
                    tokens += chances[index]
                    num_proposals += 1
            extra_s = self.costs.extra_s(num_seqs, num_proposals) + self.costs.draft_s(name, len(rates), width)
            speed = tokens / (plain_s + extra_s)
            if speed > best_speed:
                best, best_speed = width, speed
            elif width >= best + PATIENCE:
                break
        return best

    def _try(self, name, tries, num_seqs, own, limits, plain_s) -> list[int]:
        """As many sequences as the allowance pays for, those least known first; none where it does not pay for one."""
        widths, width = [0] * len(own), tries.width
        if not tries.is_trying:
            if tries.allowance_s <= 0 or self._price(name, num_seqs, 1, width, plain_s) > tries.allowance_s:
                return widths
            tries.begin()
        num = 1
        while num < len(own) and self._price(name, num_seqs, 2 * num, width, plain_s) <= tries.allowance_s:
            num *= 2
        for index in sorted(range(len(own)), key=lambda index: own[index].trials)[:num]:
            widths[index] = min(width, limits[index])
        return widths

    def _price(self, name: str, num_seqs: int, num: int, width: int, plain_s: float) -> float:
        """Seconds that a try with so many sequences takes beyond a plain step."""
        if not self.costs.is_known(name):
            return plain_s * (0.5 + 0.1 * num * width)
        return self.costs.extra_s(num_seqs, num * width) + self.costs.draft_s(name, num, width)

    def _floor(self, num_seqs: int, plain_s: float, num_proposals: int) -> float:
        """The chance below which one more proposal takes longer to verify than it saves."""
        more_s = self.costs.extra_s(num_seqs, num_proposals + 1)
        return (more_s - self.costs.extra_s(num_seqs, num_proposals)) * num_seqs / plain_s


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
