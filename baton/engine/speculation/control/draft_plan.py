"""What the controller is told of a step: whom a proposer may guess for, what is planned, and how the step went."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.engine.speculation.control.acceptance import AcceptanceRate


class DraftCandidates(NamedTuple):
    """Describe the sequences for which one proposer may guess in a step, in one order in all fields."""

    name: str  # of the proposer
    acceptance: Sequence[AcceptanceRate]  # of each sequence
    limits: Sequence[int]  # the room of each for proposals, in tokens
    has_drafts: bool = False  # the proposals exist already and cost no further time
    num_reads: float = 0.0  # tokens the proposer must read first, per token that the sequences are expected to make
    num_unread: Sequence[int] = ()  # such tokens of each sequence; empty for none
    num_left: int = 1  # tokens expected of the longest sequence


class StepOutcome(NamedTuple):
    """Describe a step that only decoded, or `num_steps` equal ones without proposals."""

    num_made: int  # tokens, in each step
    num_proposed: int
    step_s: float  # of one step, without drafting
    draft_s: float
    adaptive: Iterable[str]  # proposers whose widths the controller decided
    num_steps: int = 1
    is_plain: bool = True  # it ran as plain steps do
    last: str = ""  # the last proposer whose proposals it verified
    least_made: int = 1  # tokens of the sequence with the fewest


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
