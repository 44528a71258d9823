"""Give pages of a pool in host memory back to the system while its blocks keep their addresses.

These are the pages of blocks that nobody holds, and the pages of layers with a window in blocks that are outside the
windows of all their holders.

    block    | L L L L L G | L L L L L G | ... scales |     L: a layer with a window, G: one without
    pages      =========     =========                      whole pages within runs of neighbouring L

Tables, kernels and transports need not know: the addresses stay valid, and a page comes back, zeroed, when it is
written.
"""

import math
from collections.abc import Sequence
from itertools import groupby

from baton import system
from baton.engine.kv.pool import KVPool
from baton.system import PAGE
from kvtransfer.layout import KVGroup, KVLayout


def window_runs(group: KVGroup, windows: Sequence[int | None]) -> list[range]:
    """Return the byte ranges of a block that belong to layers with a window, a range for each run of neighbouring
    layers.

    `windows`: of each layer, None for a layer without one.
    """
    layer_bytes = group.num_kinds * group.num_kv_heads * group.cell_bytes
    found = []
    for has_window, layers in groupby(range(len(windows)), lambda layer: windows[layer] is not None):
        first, *_, last = [*layers] * 2
        if has_window:
            found.append(range(first * layer_bytes, (last + 1) * layer_bytes))
    return found


def part_bytes(layout: KVLayout, windows: Sequence[int | None]) -> int:
    """Return the bytes of whole pages that every block has within `window_runs`, in a pool that begins on a page."""
    step = math.gcd(layout.block_bytes, PAGE)

    def num_pages(run: range) -> int:
        places = range(run.start % step, PAGE, step)  # offsets within a page at which the run may begin
        return min((place + len(run)) // PAGE - -(-place // PAGE) for place in places)

    return PAGE * sum(max(0, num_pages(run)) for run in window_runs(layout.groups[0], windows))


def num_block_ids(num_blocks: int, layout: KVLayout, windows: Sequence[int | None], is_here: bool = True) -> int:
    """Return the number of block ids of a pool in host memory that has memory for `num_blocks` whole blocks.

    That is how many fit when each has given up the part of layers with a window. `is_here`: no other host has layers of
    the model.
    """
    are_both = None in windows and any(window is not None for window in windows)
    if not (are_both and is_here and system.LINUX) or layout.state is not None:
        return num_blocks
    return num_blocks * layout.block_bytes // (layout.block_bytes - part_bytes(layout, windows))


class BlockPages:
    """Give back pages of one pool, whose memory all ranks of a worker map."""

    def __init__(self, pool: KVPool, windows: Sequence[int | None]):
        self._address, self._block_bytes = pool.bytes.data_ptr(), pool.layout.block_bytes
        self._runs = window_runs(pool.group, windows)
        self._pool = pool  # keeps the memory at that address alive

    def give_back(self, block_id: int) -> None:
        """Give back the pages that belong to this block alone."""
        system.give_back_pages(self._address + block_id * self._block_bytes, self._block_bytes)

    def give_back_part(self, block_id: int) -> None:
        """Give back the block's pages of layers with a window."""
        begin = self._address + block_id * self._block_bytes
        for run in self._runs:
            system.give_back_pages(begin + run.start, len(run))
