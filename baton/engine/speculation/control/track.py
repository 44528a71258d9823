"""Keep what one proposer has of one sequence."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from baton.engine.speculation.control.acceptance import AcceptanceRate
from baton.engine.speculation.proposers.proposer import Draftee


@dataclass(slots=True, eq=False)
class Track:
    """One sequence at one proposer."""

    acceptance: AcceptanceRate
    draftee: Draftee | None = None  # once it is open
    opened_at: int = 0  # with this many tokens
    unverified: Seq[int] = ()  # proposals that were not taken up: they are judged by what came
    unverified_at: int = 0  # after this many tokens

    def judge(self) -> tuple[int, int]:
        """(num_proposed, num_accepted) of what was not taken up, as far as its tokens have come."""
        assert self.draftee is not None, "who was not asked has proposed nothing"
        came = self.draftee.token_ids[self.unverified_at : self.unverified_at + len(self.unverified)]
        draft, self.unverified = self.unverified, ()
        right = 0
        while right < len(came) and came[right] == draft[right]:
            right += 1
        return len(came), right
