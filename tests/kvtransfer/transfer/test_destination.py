"""The room that a taker makes for a prompt, range by range."""

import pytest

from kvtransfer.errors import ProtocolError, StaleBlocks, TransferFailed
from kvtransfer.layout import STATE, BlockRef, KVGroup, KVHandle, KVLayout, PromptKV
from kvtransfer.memory.blocks import BlockMemory
from kvtransfer.transfer.destination import SharedDestination

LAYOUT = KVLayout((KVGroup("paged", 1, 1, 8, "bf16", 16),))
WITH_STATES = KVLayout((*LAYOUT.groups, KVGroup(STATE, 1, 1, 8, "fp32", 1)))
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

    def verified(self, upto_token):
        """Nothing is moved here."""


class Growing(Destination):
    """Has what it was asked for and no more, as an engine has."""

    def __init__(self, block_ids):
        super().__init__(())
        self._left = iter(block_ids)

    def set_aside(self, upto_token):
        while len(self.blocks) < LAYOUT.num_blocks(upto_token):
            self.blocks.append(BlockRef(next(self._left), 1))
        return self.blocks


def shared_by(destination, layout: KVLayout = LAYOUT) -> SharedDestination:
    memory = BlockMemory(bytearray(layout.pool_bytes(NUM_BLOCKS, 4 if layout.state else 0)), layout)
    num_tokens = NUM_BLOCKS * 16
    prompt = PromptKV(num_tokens, (), (bytes(32),) * (num_tokens // 64), bytes(32))
    handle = KVHandle(b"", 0, b"", b"", "", layout, (), prompt)
    return SharedDestination(memory, destination, 1, handle)


@pytest.mark.parametrize("kind", (Destination, Growing))
def test_the_room_of_a_long_prompt_is_looked_at_once(kind):
    """A range of a span has four blocks of 16 tokens, however many came before."""
    order = [index * 5 % NUM_BLOCKS for index in range(NUM_BLOCKS)]
    destination = kind(order)
    shared = shared_by(destination)
    for upto_token in range(64, NUM_BLOCKS * 16 + 1, 64):
        before = shared.ids
        seen = before.tolist()
        shared.make_room(upto_token)
        assert before.tolist() == seen  # a thread may be reading it
        assert shared.ids[: upto_token // 16].tolist() == order[: upto_token // 16]
    assert shared.ids.tolist() == order
    assert destination.blocks.num_read <= 2 * NUM_BLOCKS


def test_what_a_destination_may_not_do():
    shared = shared_by(destination := Growing(range(100, 110)))
    shared.make_room(64)
    destination.blocks[3] = BlockRef(103, 2)
    with pytest.raises(StaleBlocks):
        shared.make_room(128)
    with pytest.raises(TransferFailed, match="2 blocks aside for 64"):
        shared_by(Destination(range(2))).make_room(64)
    with pytest.raises(ProtocolError):
        shared_by(Destination([0, 1, 2, NUM_BLOCKS])).make_room(64)


def test_the_rest_of_a_state_goes_where_the_first_of_it_is():
    shared, state = shared_by(destination := Growing(range(8)), WITH_STATES), BlockRef(2, 1)
    destination.state_block = lambda: state
    for _ in range(2):
        shared.make_room_for_state(128)
    assert shared.state_ids.tolist() == [2] and shared.ids.tolist() == list(range(8))
    state = BlockRef(3, 1)
    with pytest.raises(StaleBlocks, match="the state"):
        shared.make_room_for_state(128)
    assert shared.state_ids.tolist() == [2]
