"""What a worker's report of its load says of its blocks."""

from baton.protocol import HOLDERS
from baton.v1 import worker_pb2 as pb

HELD = HOLDERS[:4]  # of the holders of blocks: by all others a block may be taken


def blocks_of(load: pb.Load) -> dict[str, int]:
    """Return the blocks by holder, which must be all of the worker's."""
    blocks = dict(zip(HOLDERS, load.blocks_by_holder, strict=True))
    assert sum(blocks.values()) == load.num_blocks_total, f"the ledger does not balance: {load}"
    return blocks


def is_idle(load: pb.Load) -> bool:
    """Return whether every block is cached or free, and nothing runs or waits."""
    blocks = blocks_of(load)
    return not (load.num_running or load.num_waiting or any(blocks[holder] for holder in HELD))
