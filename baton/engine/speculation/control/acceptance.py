"""Estimate how often proposals are right."""

import math

ACCEPT_FORGET, LATELY_FORGET = 0.96, 0.995
PRIOR_TRIALS = 2.0  # weight of the proposer's lately against the sequence's own
HOPE = 0.2  # of 1 / sqrt(trials), whose standard deviation is at most 0.5 of it
FADE = 0.995  # of a sequence's own, per step in which others are asked and it is not: it is looked at again


class AcceptanceRate:
    """Chance that a proposal is right if those before it are, for one sequence or for all that a proposer served."""

    __slots__ = ("accepted", "trials")

    def __init__(self):
        self.accepted = self.trials = 0.0

    def add(self, num_proposed: int, num_accepted: int, forget: float = ACCEPT_FORGET) -> None:
        """Count one verified run. Proposals behind the first wrong one count for nothing."""
        self.accepted = forget * self.accepted + num_accepted
        self.trials = forget * self.trials + min(num_accepted + 1, num_proposed)

    def fade(self) -> None:
        self.accepted *= FADE
        self.trials *= FADE

    def rate(self, prior: float) -> float:
        """Return the estimated rate, optimistic after few trials: a proposer rated too high is tried and corrected, one
        rated too low never is."""
        return min(1.0, self.mean(prior) + HOPE / math.sqrt(self.trials + PRIOR_TRIALS))

    def mean(self, prior: float) -> float:
        """Return the estimated rate without hope, of which many sequences together have too much."""
        return (self.accepted + PRIOR_TRIALS * prior) / (self.trials + PRIOR_TRIALS)
