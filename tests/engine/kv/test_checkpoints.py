"""A cached prefix of a model whose layers keep a state ends where a checkpoint of the state stands."""

from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.kv.recurrent_state import RecurrentState

NAMES = [bytes([index]) * 32 for index in range(1, 6)]


def cached_spans(ledger: Ledger, num: int) -> None:
    """Seal `num` spans, a block each, and leave them to the cache."""
    block_ids = ledger.allocate(num, Holder.RUNNING)
    for name, block_id in zip(NAMES, block_ids):
        assert ledger.seal((name,), (block_id,))
    ledger.release(block_ids, Holder.RUNNING)


def no_copy(source: int, target: int) -> None:
    """There is nothing in these blocks."""


def test_a_hit_is_the_longest_prefix_with_a_checkpoint():
    ledger, seq = Ledger(8, 64, num_states=4), RecurrentState()
    cached_spans(ledger, 5)
    assert ledger.find(NAMES, 400) == []
    assert seq.allocate(ledger.states, Holder.RUNNING)
    for name in (NAMES[1], NAMES[3], NAMES[3]):
        seq.keep(ledger.states, name, no_copy)
    assert len(ledger.find(NAMES, 400)) == 4 and len(ledger.find(NAMES, 256)) == 2 and ledger.find(NAMES, 128) == []
    assert ledger.checkpoint(NAMES, 192) is None and ledger.checkpoint(NAMES, 128) is not None
    seq.give_back(ledger.states, Holder.RUNNING)
    ledger.check_integrity()
    assert ledger.states.counts()["cached"] == 2


def test_checkpoints_give_way_to_sequences_but_not_those_that_are_pinned():
    ledger, seq = Ledger(8, 64, num_states=3), RecurrentState()
    cached_spans(ledger, 5)
    assert seq.allocate(ledger.states, Holder.RUNNING)
    seq.keep(ledger.states, NAMES[0], no_copy)
    seq.keep(ledger.states, NAMES[1], no_copy)
    seq.keep(ledger.states, NAMES[2], no_copy)  # the oldest one goes
    assert ledger.checkpoint(NAMES, 64) is None and len(ledger.find(NAMES, 400)) == 3
    other = RecurrentState()
    assert other.pin(ledger, NAMES, 192, Holder.RUNNING)
    assert other.promise(ledger.states, 1) and not other.promise(ledger.states, 1)
    assert not RecurrentState().allocate(ledger.states, Holder.RUNNING), "what is left is promised"
    copied: list[tuple[int, int]] = []
    pinned = other.checkpoint_id
    assert other.enter(ledger.states, Holder.RUNNING, lambda *blocks: copied.append(blocks)) and other.is_ready
    assert copied == [(pinned, other.block_id)] and other.checkpoint_id is None
    assert ledger.checkpoint(NAMES, 128) is None, "its block was the only one left to take"
    for each in (seq, other):
        each.give_back(ledger.states, Holder.RUNNING)
    ledger.check_integrity()
    ledger.states.check_holders([])
