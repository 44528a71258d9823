"""The sequences that a proposer is asked for: what it has open of each, and how often it was right."""

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton.engine.schedule.sequence import Sequence
from baton.engine.speculation.control.acceptance import AcceptanceRate
from baton.engine.speculation.proposers.proposer import Draftee, Proposer


@dataclass(slots=True, eq=False)
class Track:
    """One sequence at one proposer."""

    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    draftee: Draftee | None = None  # while it is open
    unverified: Seq[int] = ()  # proposals that were not taken up: they are judged by what came
    unverified_at: int = 0  # after this many tokens

    def judge(self) -> tuple[int, int]:
        """(num_proposed, num_accepted) of what was not taken up, as far as its tokens have come."""
        assert self.draftee is not None
        came = self.draftee.token_ids[self.unverified_at : self.unverified_at + len(self.unverified)]
        draft, self.unverified = self.unverified, ()
        right = 0
        while right < len(came) and came[right] == draft[right]:
            right += 1
        return len(came), right


class Tracks(dict[Sequence, Track]):
    """All sequences at one proposer; one that is new to it begins at `tracks[seq]`."""

    def __init__(self, proposer: Proposer):
        super().__init__()
        self.proposer = proposer
        self.num_open = 0

    def __missing__(self, seq: Sequence) -> Track:
        track = self[seq] = Track()
        return track

    def open(self, seq: Sequence) -> Draftee:
        """Return the sequence as the proposer sees it; opened at it where it is not."""
        track = self[seq]
        if track.draftee is None:
            track.draftee = Draftee(seq.group.request, seq.choice, seq.token_ids)
            self.proposer.open(track.draftee)
            self.num_open += 1
        return track.draftee

    def num_unread(self, seq: Sequence) -> int:
        """Tokens of the sequence that the proposer has to read first."""
        track = self.get(seq)
        return self.proposer.num_unread(seq.token_ids, track and track.draftee)

    def keep(self, seqs: Container[Sequence]) -> None:
        """Close and forget all but these."""
        for seq in [seq for seq in self if seq not in seqs]:
            self._close(self.pop(seq))

    def rest(self) -> None:
        """The proposer is not wanted now: close it where it follows the target's hidden states, since it would need
        those of every step."""
        if self.proposer.wants_hidden and self.num_open:
            for track in self.values():
                self._close(track)

    def _close(self, track: Track) -> None:
        if track.draftee is not None:
            self.proposer.close(track.draftee)
            track.draftee = None
            self.num_open -= 1
