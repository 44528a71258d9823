"""Keep, for each proposer, the sequences that it is asked for and how often it was right."""

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton.engine.schedule.sequence import Sequence
from baton.engine.speculation.control.acceptance import AcceptanceRate
from baton.engine.speculation.proposers.proposer import Draftee, Proposer


@dataclass(slots=True, eq=False)
class Track:
    """Follow one sequence at one proposer."""

    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    draftee: Draftee | None = None  # None while the sequence is closed
    unverified: Seq[int] = ()  # proposals that were never verified: they are judged by the tokens that came
    unverified_at: int = 0  # the number of tokens before them

    def judge(self) -> tuple[int, int]:
        """Return (num_proposed, num_accepted) of the unverified proposals, as far as their tokens have come."""
        assert self.draftee is not None
        came = self.draftee.token_ids[self.unverified_at : self.unverified_at + len(self.unverified)]
        draft, self.unverified = self.unverified, ()
        right = 0
        while right < len(came) and came[right] == draft[right]:
            right += 1
        return len(came), right


class Tracks(dict[Sequence, Track]):
    """Map sequences to their tracks at one proposer; `tracks[seq]` makes one if there is none."""

    def __init__(self, proposer: Proposer):
        super().__init__()
        self.proposer = proposer
        self.num_open = 0

    def __missing__(self, seq: Sequence) -> Track:
        track = self[seq] = Track()
        return track

    def open(self, seq: Sequence) -> Draftee:
        """Return the sequence as the proposer sees it, opening it where it is closed."""
        track = self[seq]
        if track.draftee is None:
            track.draftee = Draftee(seq.group.request, seq.choice, seq.token_ids)
            self.proposer.open(track.draftee)
            self.num_open += 1
        return track.draftee

    def num_unread(self, seq: Sequence) -> int:
        """Return how many tokens of the sequence the proposer has to read first."""
        track = self.get(seq)
        return self.proposer.num_unread(seq.token_ids, track and track.draftee)

    def keep(self, seqs: Container[Sequence]) -> None:
        """Close and forget all sequences but these."""
        for seq in [seq for seq in self if seq not in seqs]:
            self._close(self.pop(seq))

    def rest(self) -> None:
        """Close all sequences if the proposer follows the target's hidden states, since it would need those of every
        step."""
        if self.proposer.wants_hidden and self.num_open:
            for track in self.values():
                self._close(track)

    def _close(self, track: Track) -> None:
        if track.draftee is not None:
            self.proposer.close(track.draftee)
            track.draftee = None
            self.num_open -= 1
