"""The room that a taker makes for a prompt, range by range."""

import pytest

from kvtransfer.errors import ProtocolError, StaleBlocks, TransferFailed
from kvtransfer.layout import BlockRef, KVGroup, KVHandle, KVLayout
from kvtransfer.memory.blocks import BlockMemory
from kvtransfer.transfer.pull import Shelter

LAYOUT = KVLayout((KVGroup("paged", 1, 1, 8, "bf16", 16),))
NUM_BLOCKS = 2048


class Blocks(list):
    """Counts what is read of it."""

    num_read = 0

    def __iter__(self):
        for block in super().__iter__():
            self.num_read += 1
            yield block

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


class Destination:
    num_cached_tokens = 0

    def __init__(self, block_ids):
        self.blocks = Blocks(BlockRef(block_id, 1) for block_id in block_ids)

    def set_aside(self, upto_token):
        return self.blocks


class Growing(Destination):
    """Has what it was asked for and no more, as an engine has."""

    def __init__(self, block_ids):
        super().__init__(())
        self._left = iter(block_ids)

    def set_aside(self, upto_token):
        while len(self.blocks) < LAYOUT.num_blocks(upto_token):
            self.blocks.append(BlockRef(next(self._left), 1))
        return self.blocks


def shelter_of(destination) -> Shelter:
    memory = BlockMemory(bytearray(NUM_BLOCKS * LAYOUT.block_bytes), LAYOUT)
    handle = KVHandle(b"", 0, b"", b"", "", LAYOUT, (), NUM_BLOCKS * 16, (), b"", ())
    return Shelter(memory, destination, 1, handle)


@pytest.mark.parametrize("kind", (Destination, Growing))
def test_the_room_of_a_long_prompt_is_looked_at_once(kind):
    """A range of a span has four blocks of 16 tokens, however many came before."""
    order = [index * 5 % NUM_BLOCKS for index in range(NUM_BLOCKS)]
    destination = kind(order)
    shelter = shelter_of(destination)
    for upto_token in range(64, NUM_BLOCKS * 16 + 1, 64):
        before = shelter.ids
        seen = before.tolist()
        shelter.make_room(upto_token)
        assert before.tolist() == seen  # a thread may be reading it
        assert shelter.ids[: upto_token // 16].tolist() == order[: upto_token // 16]
    assert shelter.ids.tolist() == order
    assert destination.blocks.num_read <= 2 * NUM_BLOCKS


def test_what_a_destination_may_not_do():
    shelter = shelter_of(destination := Growing(range(100, 110)))
    shelter.make_room(64)
    destination.blocks[3] = BlockRef(103, 2)
    with pytest.raises(StaleBlocks):
        shelter.make_room(128)
    with pytest.raises(TransferFailed, match="2 blocks aside for 64"):
        shelter_of(Destination(range(2))).make_room(64)
    with pytest.raises(ProtocolError):
        shelter_of(Destination([0, 1, 2, NUM_BLOCKS])).make_room(64)
