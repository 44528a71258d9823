"""Keep the live groups of one engine by key, with their deadlines, and count what they hold."""

import heapq

from baton.engine.core.request import Key, Request
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.sampling.grammars import Grammars
from baton.engine.schedule.inbox import Inbox
from baton.engine.schedule.scheduler import Scheduler
from baton.engine.schedule.sequence import SequenceGroup
from baton.engine.schedule.states import GroupState
from kvtransfer.layout import KVLayout

_NUM_SPARE = 64  # the heap is filtered when it has twice as many deadlines as there are live groups and these


class Groups(dict[Key, SequenceGroup]):
    """The live groups by key, guarded by the ledger's lock.

    Code that looks a group up acts on it under the same lock. The loop need not for the groups that it has: only the
    loop ends those.
    """

    def __init__(self) -> None:
        super().__init__()
        # A heap; the arrival tells apart two groups with the same key.
        self._deadlines: list[tuple[float, int, Key]] = []

    def find(self, key: Key, arrival: int) -> SequenceGroup | None:
        """Return the group with this key and arrival, or None if it has ended."""
        group = self.get(key)
        return group if group is not None and group.arrival == arrival else None

    def add_deadline(self, group: SequenceGroup) -> None:
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

    def pop_expired(self, now: float) -> SequenceGroup | None:
        """Return a group whose deadline has passed, or None. Each group is returned once."""
        while self.is_due(now):
            _, arrival, key = heapq.heappop(self._deadlines)
            group = self.find(key, arrival)
            if group and group.deadline <= now:
                return group
        return None


class GroupContext:
    """What the actions of groups work on: the parts of one engine, and what the groups count and hold together.

    Guarded by the ledger's lock.
    """

    def __init__(
        self, layout: KVLayout, ledger: Ledger, inbox: Inbox, groups: Groups, scheduler: Scheduler,
        grammars: Grammars | None,
    ):  # fmt: skip
        """Take the parts of one engine. `grammars` is None if it has no tokenizer: then no group has a constraint."""
        self.layout = layout
        self.ledger = ledger
        self.inbox = inbox
        self.groups = groups
        self.scheduler = scheduler
        self.grammars = grammars
        self.num_waiting_tokens = 0  # of prompts whose first chunk is not launched yet
        self.num_choices = 0  # of admitted groups that are neither parked nor ended
        self.quarantined: dict[Key, list[int]] = {}
        self.quarantined_states: dict[Key, list[int]] = {}

    def num_to_grow(self, request: Request) -> int:
        """Return how many blocks beyond the prompt's are promised to a request.

        That is enough for all choices to reach the recent average length, and a tail block for each choice but the
        first.
        """
        num_tokens, n = len(request.token_ids), request.sampling.n
        left = self.scheduler.lengths.expected_left(request, num_tokens - request.num_prompt_tokens)
        growth = self.layout.num_blocks(num_tokens + left) - self.layout.num_blocks(num_tokens)
        return n * growth + (n - 1) * bool(num_tokens % self.layout.block_size)

    def holdings(self) -> list[tuple[Holder, list[int]]]:
        """Return the blocks held according to the groups' own records, by holder, to compare with the ledger."""
        held = [(Holder.QUARANTINED, block_ids) for block_ids in self.quarantined.values()]
        for group in self.groups.values():
            for seq in group.live:
                block_ids, num_fetching = seq.blocks.held(self.ledger.window)[0], 0
                if group.state is GroupState.FETCHING:
                    num_fetching = len(seq.blocks.ids) - group.num_owned
                num_owned = len(block_ids) - num_fetching
                held += [(group.holder, block_ids[:num_owned]), (Holder.FETCHING, block_ids[num_owned:])]
        return held

    def window_holdings(self) -> list[list[int]]:
        """Return for each holder the blocks of which it also holds the part inside the window."""
        return [
            *self.quarantined.values(),
            *(seq.blocks.window_ids for group in self.groups.values() for seq in group.live),
        ]

    def state_holdings(self) -> list[tuple[Holder, list[int]]]:
        """Return the state blocks held according to the groups' own records, by holder."""
        held = [(Holder.QUARANTINED, block_ids) for block_ids in self.quarantined_states.values()]
        for group in self.groups.values():
            for seq in group.live:
                held += seq.recurrent.held(group.holder)
        return held

    def num_states_promised(self) -> int:
        """Return how many state blocks are promised to the sequences of all groups."""
        return sum(seq.recurrent.reserve for group in self.groups.values() for seq in group.live)

    def num_promised(self) -> int:
        """Return how many blocks are promised to the sequences of all groups."""
        return sum(seq.blocks.reserve for group in self.groups.values() for seq in group.live)
