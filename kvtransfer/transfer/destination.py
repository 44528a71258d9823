"""Where the KV of a fetch goes: blocks in the taker's pool, which several shares fill at the same time."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvtransfer.errors import StaleBlocks, TransferFailed
from kvtransfer.layout import BlockRef, KVHandle
from kvtransfer.memory.blocks import BlockMemory


class Destination(Protocol):
    """Receive the KV of a fetch: the blocks of one request in the taker's pool. Called in the event loop."""

    num_cached_tokens: int  # verified there already, so the fetch begins here; a multiple of 64

    def set_aside(self, upto_token: int) -> Sequence[BlockRef]:
        """Return blocks that hold the tokens [0, upto_token), from the first on, the same ones at every call. What it
        raises ends the fetch."""
        ...

    def state_block(self) -> BlockRef:
        """Return the block for the state behind the last token, where the layout has one."""
        ...

    def verified(self, upto_token: int) -> None:
        """Digest, generation and lease of everything below were right, the state behind it among them: it may be
        attended to and cached."""

    async def caught_up(self) -> None:
        """Wait until what is verified has gone wherever else it must go. The source is let on when it has, and the
        fetch ends then. What this raises ends the fetch."""


class CommonProgress:
    """Join the progress of the parts of one fetch: `on_common` is called with what all of them have verified, when that
    grows."""

    def __init__(self, num_parts: int, begin: int, on_common: Callable[[int], None], least: int = 0):
        """`begin`: the token that each part begins at; less than `least` is not spoken of."""
        self._verified = [begin] * num_parts
        self._common, self._least = begin, least
        self._on_common = on_common

    def note(self, part: int, upto_token: int) -> None:
        """Take what one part has verified."""
        self._verified[part] = upto_token
        if (common := min(self._verified)) > self._common and common >= self._least:
            self._common = common
            self._on_common(common)


class SharedDestination:
    """The destination of all shares of one fetch: `destination` is called with what all of them have; of a prompt with
    a state once that is all, since the state is the one behind the last token and goes with no fewer."""

    def __init__(self, memory: BlockMemory, destination: Destination, num_shares: int, handle: KVHandle):
        self.num_cached_tokens = destination.num_cached_tokens
        self._memory = memory
        self._destination = destination
        least = 0 if handle.layout.state is None else handle.num_tokens
        self._progress = CommonProgress(num_shares, self.num_cached_tokens, destination.verified, least)
        self._last: BlockRef | None = None  # of the blocks of `ids`
        self._room = np.empty(0, np.int64)  # for ids; `ids` is the part of it that is known
        self.ids = self.state_ids = self._room  # of the blocks set aside; of the one state

    def make_room(self, upto_token: int) -> None:
        """Look at blocks that were not there before, and at the last that was: a long prompt comes in thousands of
        ranges, each with a few. Raises what the destination raises, TransferFailed, StaleBlocks."""
        blocks, known = self._destination.set_aside(upto_token), len(self.ids)
        if len(blocks) < self._memory.layout.num_blocks(upto_token):
            raise TransferFailed(f"the destination set {len(blocks)} blocks aside for {upto_token} tokens")
        if 0 < known <= len(blocks) and blocks[known - 1] != self._last:
            raise StaleBlocks("the destination has given blocks of this fetch to another request")
        if len(blocks) > known:
            self._append(self._memory.check_ids([block.block_id for block in blocks[known:]]))
            self._last = blocks[-1]

    def _append(self, ids: np.ndarray) -> None:
        known, end = len(self.ids), len(self.ids) + len(ids)
        if end > len(self._room):  # a thread may still read what `ids` was
            self._room = np.concatenate((self.ids, np.empty(2 * end - known, np.int64)))
        self._room[known:end] = ids
        self.ids = self._room[:end]

    def make_room_for_state(self, num_tokens: int) -> None:
        """Make room for the state behind so many tokens, and for them. Raises as `make_room` does."""
        self.make_room(num_tokens)
        found = self._memory.check_ids([self._destination.state_block().block_id], are_states=True)
        if len(self.state_ids) and self.state_ids[0] != found[0]:
            raise StaleBlocks("the destination has given the state of this fetch to another request")
        self.state_ids = found

    def verified(self, share: int, upto_token: int) -> None:
        """Note what one share has verified."""
        self._progress.note(share, upto_token)

    async def caught_up(self) -> None:
        """Wait as the destination does."""
        await self._destination.caught_up()
