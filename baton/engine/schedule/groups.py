"""Keep the live groups of one engine by key, with their deadlines, and decide which of them the next step may
compute."""

import heapq
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count

from baton.engine.core.request import FirstToken, Key
from baton.engine.kv.ledger import Ledger
from baton.engine.schedule.sequence import Copies, Group, Sequence
from kvtransfer.naming import SPAN_TOKENS

MIN_SEQS = 8  # in a turn: a step of 4 sequences takes about as long as one of 8, since most of its time reads weights
_rounds = count(1)
_NUM_SPARE = 64  # stale deadlines kept beyond twice the number of live groups


class Groups(dict[Key, Group]):
    """The live groups by key, guarded by the ledger's lock.

    Code that looks a group up acts on it under the same lock. The loop need not for the groups that it has: only the
    loop ends those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deadlines: list[tuple[float, int, Key]] = []  # a heap; the arrival tells apart two groups with the same
        # key

    def find(self, key: Key, arrival: int) -> Group | None:
        """Return the group with this key and arrival, or None if it has ended."""
        group = self.get(key)
        return group if group is not None and group.arrival == arrival else None

    def add_deadline(self, group: Group) -> None:
        """Add a group's deadline, after which `pop_expired` returns the group. An earlier deadline of the group stays
        in the heap."""
        if group.deadline == float("inf"):
            return
        heapq.heappush(self._deadlines, (group.deadline, group.arrival, group.key))
        if len(self._deadlines) > 2 * (len(self) + _NUM_SPARE):
            self._deadlines = list({entry for entry in self._deadlines if self._is_present(*entry)})
            heapq.heapify(self._deadlines)

    def _is_present(self, deadline: float, arrival: int, key: Key) -> bool:
        """Return whether an entry of the heap is the current deadline of a live group."""
        group = self.find(key, arrival)
        return group is not None and group.deadline == deadline

    def is_due(self, now: float) -> bool:
        """Return whether any deadline has passed. It may be a stale one."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    def pop_expired(self, now: float) -> Group | None:
        """Return a group whose deadline has passed, or None. Each group is returned once."""
        while self.is_due(now):
            _, arrival, key = heapq.heappop(self._deadlines)
            group = self.find(key, arrival)
            if group and group.deadline <= now:
                return group
        return None


class StepEligibility:
    """Decide which sequences the next step may compute while other steps are in flight (launched, outputs not read).

    With one pipeline stage a sequence continues from the token that is still being drawn. With several stages each
    stage works on different sequences: every step takes about the same number of decoding sequences, those that waited
    longest first. All choices of a group go into the same step, since they may end together.
    """

    def __init__(
        self, running: Iterable[Sequence] = (), in_flight: Seq[Seq[tuple[Sequence, int, int]]] = (),
        num_stages: int = 1, has_states: bool = False,
    ):  # fmt: skip
        """Take the running sequences and the slices (sequence, begin, end) of each step in flight."""
        self._ends = {seq: end for slices in in_flight for seq, _, end in slices}
        self._decoding: set[Group] | None = None  # None: all
        self._busy = set[Group]()
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
        place = seq.num_computed // SPAN_TOKENS
        name = seq.hashes[place : place + 1]
        is_coming = bool(name) and any(
            other.num_computed <= seq.num_computed < end and other.hashes[place : place + 1] == name
            for other, end in self._ends.items()
        )
        return not is_coming and seq.group not in self._busy

    def _choose(self, counts: Counter[Group], num_turns: int) -> set[Group]:
        """Choose the decoding groups of this turn: those that waited longest, until they are one turn's share."""
        chosen, num_seqs, this_round = set[Group](), 0, next(_rounds)
        for group in sorted(counts, key=lambda group: group.last_chosen):
            if num_seqs * num_turns < counts.total() and group not in self._busy:
                chosen.add(group)
                num_seqs += counts[group]
                group.last_chosen = this_round
        return chosen


def fork(
    trunk: Sequence, first_tokens: list[FirstToken], ledger: Ledger, block_size: int, copies: Copies
) -> list[Sequence]:
    """Make the trunk the first live choice and return new sequences for the others, each with its first token.

    There is at least one first token. Full blocks of the prompt are shared; the tail is copied.
    """
    group, prompt = trunk.group, list(trunk.token_ids)
    others = [
        Sequence(group, first.choice, [*prompt, first.token_id], list(trunk.hashes)) for first in first_tokens[1:]
    ]
    group.live += others
    for seq in others:
        trunk.share_prompt(seq, ledger, block_size, copies)
    trunk.recurrent.unpromise(ledger.states)
    trunk.choice = first_tokens[0].choice
    trunk.order_key = (*trunk.order_key[:2], trunk.choice)
    trunk.token_ids.append(first_tokens[0].token_id)
    share = trunk.reserve // (1 + len(others))
    for seq in others:
        seq.reserve = share
        trunk.reserve -= share
    return others
