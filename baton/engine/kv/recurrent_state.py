"""Keep the state blocks of one sequence: its own, which its tokens are folded into, and the checkpoint it starts from.

pinned ───────── enter ────────►  ready  ── give back ──► nothing
a checkpoint of the cache         a block of its own stands at num_computed,
fetching ─────── verified ─────►  the tokens of accepted proposals aside
bytes land in its own block
"""

from collections.abc import Callable, Sequence

from baton.engine.kv.ledger import Holder, Ledger

CopyState = Callable[[int, int], None]  # (source block, target block), between steps


class RecurrentState:
    """The state blocks of one sequence; empty for models without a state. Guarded as the sequence's blocks are."""

    __slots__ = ("block_id", "holder", "checkpoint_id", "kept_id", "reserve", "is_ready", "num_pending")

    def __init__(self):
        self.block_id: int | None = None
        self.holder = Holder.FREE  # of its own block: its group's holder, or FETCHING
        self.checkpoint_id: int | None = None  # pinned, until `enter` has copied it
        self.kept_id: int | None = None  # a copy that becomes a checkpoint when the step in flight has passed
        self.reserve = 0  # blocks promised and not taken yet
        self.is_ready = False
        self.num_pending = 0  # accepted proposals that are not folded into the block yet

    @property
    def own_id(self) -> int:
        """Its own block, which it must have."""
        assert self.block_id is not None
        return self.block_id

    @property
    def num_own(self) -> int:
        """The number of its own blocks, promised ones included."""
        return self.reserve + (self.block_id is not None)

    def held(self, holder: Holder) -> list[tuple[Holder, list[int]]]:
        """Return the blocks that it holds, by holder, where `holder` is its group's."""
        held = [(self.holder, self.block_id), (holder, self.checkpoint_id), (Holder.RUNNING, self.kept_id)]
        return [(each, [block_id]) for each, block_id in held if block_id is not None]

    def pin(self, ledger: Ledger, span_hashes: Sequence[bytes], num_tokens: int, holder: Holder) -> bool:
        """Hold the checkpoint of a cached prefix in place of an earlier one. Returns False if all free blocks are
        promised."""
        found = ledger.checkpoint(span_hashes, num_tokens)
        if found is None or ledger.states is None:
            return True
        if not ledger.states.share([found], holder):
            return False
        self._unpin(ledger.states, holder)
        self.checkpoint_id = found
        return True

    def num_to_have(self, states: Ledger | None, num_choices: int) -> int:
        """Return how many own blocks to promise it: one for each choice, or as many as fit beside a pinned checkpoint.

        A choice without one starts as preempted.
        """
        return 0 if states is None else min(num_choices, states.num_blocks - (self.checkpoint_id is not None))

    def promise(self, states: Ledger | None, num_choices: int) -> bool:
        """Reserve blocks for its choices. Returns False if they are not available."""
        if states is None:
            return True
        num = self.num_to_have(states, num_choices)
        if not states.reserve(num):
            return False
        self.reserve += num
        return True

    def allocate(self, states: Ledger | None, holder: Holder) -> bool:
        """Allocate its own block, from its promise first. Returns False if none is available."""
        if states is None or self.block_id is not None:
            return True
        reserved = min(1, self.reserve)
        block_ids = states.allocate(1, holder, reserved)
        if block_ids is None:
            return False
        self.block_id, self.holder = block_ids[0], holder
        self.reserve -= reserved
        return True

    def note_verified(self, states: Ledger | None, holder: Holder) -> None:
        """Note that the state fetched into its own block is verified."""
        if states is not None:
            self.settle(states, holder)
            self._unpin(states, holder)
            self.is_ready = True

    def settle(self, states: Ledger | None, holder: Holder) -> None:
        """Note that no byte of a fetch lands in its own block any more."""
        if states is not None and self.block_id is not None and self.holder is Holder.FETCHING:
            states.move([self.block_id], Holder.FETCHING, holder)
            self.holder = holder

    def pop_fetching(self) -> list[int]:
        """Give up its own block if bytes may still land in it, and return it for the caller to release."""
        if self.block_id is None or self.holder is not Holder.FETCHING:
            return []
        block_id, self.block_id = self.block_id, None
        return [block_id]

    def enter(self, states: Ledger | None, holder: Holder, copy: CopyState) -> bool:
        """Take an own block and copy the checkpoint into it. Returns False if no block is available."""
        if states is None or not self.allocate(states, holder):
            return states is None
        if self.checkpoint_id is not None:
            copy(self.checkpoint_id, self.own_id)
            self._unpin(states, holder)
        self.is_ready = True
        return True

    def fork(self, other: "RecurrentState", states: Ledger | None, copy: CopyState) -> bool:
        """Give another choice a block with the same state, from its own promise. Returns False if none is available."""
        if states is None:
            return True
        other.reserve, self.reserve = min(1, self.reserve), self.reserve - min(1, self.reserve)
        if not other.allocate(states, Holder.RUNNING):
            return False
        copy(self.own_id, other.own_id)
        other.is_ready = True
        return True

    def copy_ahead(self, states: Ledger, copy: CopyState) -> None:
        """Copy the state as the step in flight leaves it, before another step is launched that folds more into it."""
        if (block_ids := states.allocate(1, Holder.RUNNING)) is not None:
            copy(self.own_id, block_ids[0])
            self.kept_id = block_ids[0]

    def keep(self, states: Ledger, name: bytes, copy: CopyState, goes_on: bool = False) -> None:
        """Make a checkpoint of the state, or of its copy if the sequence `goes_on` in a step launched since.

        `name` is the span before it. Does nothing if there is such a checkpoint already, or no block was left for
        one.
        """
        if self.kept_id is None and not goes_on and not states.cache.get(name):
            self.copy_ahead(states, copy)
        if self.kept_id is not None:
            if not states.cache.get(name):
                states.seal((name,), (self.kept_id,))
            self._drop_kept(states)

    def unpromise(self, states: Ledger | None) -> None:
        """Return its promise to the ledger."""
        if states is not None:
            states.unreserve(self.reserve)
            self.reserve = 0

    def give_back(self, states: Ledger | None, holder: Holder) -> None:
        """Release all its blocks and its promise."""
        if states is None:
            return
        self.unpromise(states)
        self._unpin(states, holder)
        self._drop_kept(states)
        if self.block_id is not None:
            states.release([self.block_id], self.holder)
        self.block_id, self.is_ready, self.num_pending = None, False, 0

    def _drop_kept(self, states: Ledger) -> None:
        if self.kept_id is not None:
            states.release([self.kept_id], Holder.RUNNING)
            self.kept_id = None

    def _unpin(self, states: Ledger, holder: Holder) -> None:
        if self.checkpoint_id is not None:
            states.release([self.checkpoint_id], holder)
            self.checkpoint_id = None
