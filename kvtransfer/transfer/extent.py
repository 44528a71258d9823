"""Say what one dialogue moves of a prompt: its tokens, or the state after them. A state counts as one token in a block
of its own, and is ready when the whole prompt is."""

import hashlib
from typing import NamedTuple

from kvtransfer.layout import STATE, BlockRef, Box, KVLayout, PromptKV
from kvtransfer.memory.digest import span_names
from kvtransfer.transfer.leases import Lease, Watermark


class Extent(NamedTuple):
    """Describe what a dialogue moves; `names` seed the digests, one for each span."""

    is_state: bool
    num_tokens: int
    blocks: tuple[BlockRef, ...]
    names: list[bytes]

    def watermark(self, lease: Lease) -> Watermark:
        if not self.is_state:
            return lease.watermark
        return Watermark(1, 1, lease.num_layers) if lease.is_complete else Watermark(0, 0, 0)


def extent_of(prompt: PromptKV, layout: KVLayout, box: Box) -> Extent:
    """Return what a dialogue about `box` of a prompt moves; `layout`: of the whole model."""
    names = span_names(prompt.span_hashes, prompt.chain_parent, prompt.num_tokens)
    if layout.groups[box.group].kind != STATE:
        return Extent(False, prompt.num_tokens, prompt.blocks, names)
    return Extent(True, 1, prompt.states, [hashlib.sha256(b"baton-state-1" + names[-1]).digest()])
