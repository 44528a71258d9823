"""Receive the KV of a fetch in blocks of the taker's pool, which several shares fill at the same time."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvtransfer.errors import StaleBlocks, TransferFailed
from kvtransfer.layout import BlockRef, KVHandle
from kvtransfer.memory.blocks import BlockMemory


class Destination(Protocol):
    """Receive the KV of a fetch in the blocks of one request of the taker's pool. Called in the event loop."""

    num_cached_tokens: int  # already verified, so the fetch begins after them; a multiple of 64

    def set_aside(self, upto_token: int) -> Sequence[BlockRef]:
        """Return the blocks for the tokens [0, upto_token), in order; later calls return the same blocks and more. An
        error that this raises ends the fetch."""
        ...

    def state_block(self) -> BlockRef:
        """Return the block for the state after the last token, for a layout with a state."""
        ...

    def verified(self, upto_token: int) -> None:
        """Note that everything below `upto_token` is verified (digests, generations, lease; the state too): it may be
        attended to and cached."""

    async def caught_up(self) -> None:
        """Wait until the verified KV has reached every other place where it must be. The source's next ranges and the
        fetch's end wait for this. An error that this raises ends the fetch."""


class CommonProgress:
    """Join the progress of the parts of one fetch: call `on_common` whenever the token that all parts have verified
    grows."""

    def __init__(self, num_parts: int, begin: int, on_common: Callable[[int], None], least: int = 0):
        """Begin each part at token `begin`; `on_common` is not called below `least`."""
        self._verified = [begin] * num_parts
        self._common, self._least = begin, least
        self._on_common = on_common

    def note(self, part: int, upto_token: int) -> None:
        """Note that one part has verified everything below `upto_token`."""
        self._verified[part] = upto_token
        if (common := min(self._verified)) > self._common and common >= self._least:
            self._common = common
            self._on_common(common)


class SharedDestination:
    """Fill one destination from all shares of a fetch. `destination.verified` is called with what all shares have. For
    a prompt with a state it is called only at the end, since the state belongs to the last token."""

    def __init__(self, memory: BlockMemory, destination: Destination, num_shares: int, handle: KVHandle):
        self.num_cached_tokens = destination.num_cached_tokens
        self._memory = memory
        self._destination = destination
        least = 0 if handle.layout.state is None else handle.prompt.num_tokens
        self._progress = CommonProgress(num_shares, self.num_cached_tokens, destination.verified, least)
        self._last: BlockRef | None = None  # the last block of `ids`
        self._room = np.empty(0, np.int64)  # buffer whose first part is `ids`
        self.ids = self.state_ids = self._room  # ids of the blocks set aside, and of the one state

    def make_room(self, upto_token: int) -> None:
        """Get blocks for the tokens below `upto_token`. Only new blocks and the last known one are checked, since a
        long prompt comes in thousands of ranges with a few blocks each. Raises what the destination raises,
        TransferFailed, StaleBlocks."""
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
        if end > len(self._room):  # not resized in place: a thread may still read the old `ids`
            self._room = np.concatenate((self.ids, np.empty(2 * end - known, np.int64)))
        self._room[known:end] = ids
        self.ids = self._room[:end]

    def make_room_for_state(self, num_tokens: int) -> None:
        """Get blocks for `num_tokens` tokens and for the state after them. Raises as `make_room` does."""
        self.make_room(num_tokens)
        found = self._memory.check_ids([self._destination.state_block().block_id], are_states=True)
        if len(self.state_ids) and self.state_ids[0] != found[0]:
            raise StaleBlocks("the destination has given the state of this fetch to another request")
        self.state_ids = found

    def verified(self, share: int, upto_token: int) -> None:
        """Note that one share has verified everything below `upto_token`."""
        self._progress.note(share, upto_token)

    async def caught_up(self) -> None:
        await self._destination.caught_up()
