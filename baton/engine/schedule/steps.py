"""Define what a step computes and draws, and decide which sequences the next step may compute."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count
from typing import NamedTuple

from baton.engine.sampling.sampler import Sampled
from baton.engine.schedule.sequence import Sequence, SequenceGroup
from kvtransfer.naming import SPAN_TOKENS

MIN_SEQS = 8  # in a turn: a step of 4 sequences takes about as long as one of 8, since most of its time reads weights
_rounds = count(1)

Drawn = tuple[Sequence, list[Sampled]]  # at the end of a prompt a token for each choice, then those that follow


class Slice(NamedTuple):
    """Tokens [begin, end) of a sequence, computed in one step. If they are its last tokens, the next one is drawn."""

    seq: Sequence
    begin: int
    end: int


class StepEligibility:
    """Decide which sequences the next step may compute while other steps are in flight (launched, outputs not read).

    With one pipeline stage a sequence continues from the token that is still being drawn. With several stages each
    stage works on different sequences: every step takes about the same number of decoding sequences, those that waited
    longest first. All choices of a group go into the same step, since they may end together.
    """

    def __init__(
        self, running: Iterable[Sequence] = (), in_flight: Seq[Seq[Slice]] = (),
        num_stages: int = 1, has_states: bool = False,
    ):  # fmt: skip
        """Take the running sequences and the slices of each step in flight."""
        self._ends = {seq: end for slices in in_flight for seq, _, end in slices}
        self._decoding: set[SequenceGroup] | None = None  # None: all
        self._busy = set[SequenceGroup]()
        if num_stages > 1:
            # The next chunk of a prompt may follow one in flight, unless a state is kept as that chunk leaves it.
            self._busy = {seq.group for seq in self._ends if seq.group.prefilled or has_states}
            counts = Counter(seq.group for seq in running if seq.group.prefilled and seq.remaining == 1)
            num_turns = max(1, min(num_stages, counts.total() // MIN_SEQS))
            num_taken = sum(any(seq.group.prefilled for seq, _, _ in slices) for slices in in_flight)
            self._decoding = set() if num_taken >= num_turns else self._choose(counts, num_turns)
        self.has_short_chunks = self._decoding is not None and any(seq.group.prefilled for seq in running)

    def first_uncomputed(self, seq: Sequence) -> int:
        """Return the first token of a sequence that no launched step computes."""
        return self._ends.get(seq, seq.num_computed)

    def may_run(self, seq: Sequence) -> bool:
        """Return whether the step may compute tokens of a running sequence."""
        if self._decoding is None or seq.group in self._decoding:
            return True
        return seq.group not in self._busy and (seq.remaining > 1 or not seq.group.prefilled)

    def may_enter(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may start to run.

        It may not while a step in flight computes its next span for another sequence: the span will be in the cache.
        """
        span = seq.num_computed // SPAN_TOKENS
        name = seq.hashes[span : span + 1]
        is_coming = bool(name) and any(
            other.num_computed <= seq.num_computed < end and other.hashes[span : span + 1] == name
            for other, end in self._ends.items()
        )
        return not is_coming and seq.group not in self._busy

    def _choose(self, counts: Counter[SequenceGroup], num_turns: int) -> set[SequenceGroup]:
        """Choose the decoding groups of this turn: those that waited longest, until they are one turn's share."""
        chosen, num_seqs, this_round = set[SequenceGroup](), 0, next(_rounds)
        for group in sorted(counts, key=lambda group: group.last_chosen):
            if num_seqs * num_turns < counts.total() and group not in self._busy:
                chosen.add(group)
                num_seqs += counts[group]
                group.last_chosen = this_round
        return chosen
