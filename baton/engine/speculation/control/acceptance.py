"""Estimate how often proposals are right."""

import math

ACCEPT_FORGET, LATELY_FORGET = 0.96, 0.995
PRIOR_TRIALS = 2.0  # the weight of the proposer's recent rate against the sequence's own
# Times 1 / sqrt(trials): the bonus of few trials, whose standard deviation is at most 0.5 / sqrt(trials).
FEW_TRIALS_BONUS = 0.2
# Per step in which other sequences are asked and this one is not, so that it is asked again some day.
UNASKED_FADE = 0.995


class AcceptanceRate:
    """Chance that a proposal is right if those before it are, for one sequence or for all that a proposer served."""

    __slots__ = ("accepted", "trials")

    def __init__(self):
        self.accepted = self.trials = 0.0

    def add(self, num_proposed: int, num_accepted: int, forget: float = ACCEPT_FORGET) -> None:
        """Count one verified run of proposals. Those after the first wrong one are not counted."""
        self.accepted = forget * self.accepted + num_accepted
        self.trials = forget * self.trials + min(num_accepted + 1, num_proposed)

    def fade(self) -> None:
        """Forget a little of what was counted, since the sequence was not asked in this step."""
        self.accepted *= UNASKED_FADE
        self.trials *= UNASKED_FADE

    def rate(self, prior: float) -> float:
        """Return the estimated rate with a bonus for few trials: a proposer rated too high is tried and corrected, one
        rated too low is never tried."""
        return min(1.0, self.mean(prior) + FEW_TRIALS_BONUS / math.sqrt(self.trials + PRIOR_TRIALS))

    def mean(self, prior: float) -> float:
        """Return the estimated rate without the bonus, which would add up over many sequences."""
        return (self.accepted + PRIOR_TRIALS * prior) / (self.trials + PRIOR_TRIALS)
