"""The prefix cache through the ledger: names, units, matches, events."""

from baton.engine.kv.ledger import Holder, Ledger
from kvtransfer.naming import SpanHash, chain_hashes

ROOT = SpanHash(b"r" * 32)


def sealed(ledger: Ledger, token_ids: list[int]) -> tuple[list[bytes], list[int]]:
    """Seals all units of a sequence and gives its blocks back to the cache: its hashes and blocks."""
    cache = ledger.cache
    hashes = chain_hashes(ROOT, token_ids)
    num_units = len(token_ids) // cache.unit_tokens
    block_ids = ledger.allocate(num_units * cache.blocks_per_unit, Holder.RUNNING)
    for unit in range(num_units):
        spans = tuple(hashes[unit * cache.spans_per_unit : (unit + 1) * cache.spans_per_unit])
        ledger.seal(spans, tuple(block_ids[unit * cache.blocks_per_unit : (unit + 1) * cache.blocks_per_unit]))
    ledger.release(block_ids, Holder.RUNNING)
    ledger.check_integrity()
    return hashes, block_ids


def test_a_match_leaves_the_last_token_to_be_computed():
    ledger = Ledger(16, 32)
    hashes, block_ids = sealed(ledger, list(range(256)))
    assert ledger.find(hashes, 256) == block_ids[:6]
    assert ledger.find(hashes, 257) == block_ids[:8]
    assert ledger.find(hashes, 64) == []
    assert ledger.find(hashes, 65) == block_ids[:2]


def test_a_match_ends_where_the_tokens_differ():
    ledger = Ledger(16, 16)
    _, block_ids = sealed(ledger, list(range(128)))
    other = chain_hashes(ROOT, [*range(64), 999, *range(65, 192)])
    assert ledger.find(other, 192) == block_ids[:4]
    assert ledger.find(chain_hashes(SpanHash(b"q" * 32), list(range(128))), 128) == []


def test_a_block_of_two_spans_is_one_unit_named_by_its_last():
    ledger = Ledger(4, 128)
    hashes, block_ids = sealed(ledger, list(range(256)))
    assert len(hashes) == 4 and ledger.cache.spans_per_unit == 2
    assert ledger.find(hashes, 257) == block_ids
    assert ledger.find(hashes, 200) == block_ids[:1]
    assert ledger.snapshot() == hashes


def test_the_whole_hash_is_compared():
    ledger = Ledger(4, 64)
    hashes, _ = sealed(ledger, list(range(64)))
    near = bytes([*hashes[0][:31], hashes[0][31] ^ 1])
    assert ledger.find([near], 65) == []


def test_fewer_names_than_tokens_is_a_shorter_match():
    ledger = Ledger(8, 64)
    hashes, block_ids = sealed(ledger, list(range(192)))
    assert ledger.find(hashes[:1], 500) == block_ids[:1]
    assert ledger.find([], 500) == []


def test_a_name_that_is_taken_keeps_its_first_blocks():
    ledger = Ledger(4, 64)
    hashes, block_ids = sealed(ledger, list(range(64)))
    twin = ledger.allocate(1, Holder.RUNNING)
    assert not ledger.seal((hashes[0],), tuple(twin))
    ledger.release(twin, Holder.RUNNING)
    assert ledger.counts()["cached"] == 1 and ledger.find(hashes, 65) == block_ids
    ledger.check_integrity()


def test_choices_that_share_part_of_a_unit():
    """Two choices share the prompt's full blocks, which end inside a unit: only one of them can name that unit."""
    ledger = Ledger(8, 16)
    shared = ledger.allocate(2, Holder.RUNNING)
    first, second = ledger.allocate(2, Holder.RUNNING), ledger.allocate(2, Holder.RUNNING)
    ledger.share(shared, Holder.RUNNING)
    assert ledger.seal((b"1" * 32,), (*shared, *first))
    assert not ledger.seal((b"2" * 32,), (*shared, *second))
    ledger.release(shared + first, Holder.RUNNING)
    ledger.check_integrity()
    assert ledger.num_available == 4  # two never taken, and two that only the cache holds
    assert len(ledger.allocate(4, Holder.RUNNING)) == 4
    ledger.check_integrity()
    assert ledger.snapshot() == []


def test_events_are_the_net_change():
    ledger = Ledger(2, 64)
    one, _ = sealed(ledger, list(range(64)))
    assert ledger.block_events() == (one, [])
    assert ledger.block_events() == ([], [])
    two, _ = sealed(ledger, list(range(100, 228)))  # evicts the first
    assert ledger.block_events() == (two, one)
    sealed(ledger, list(range(64)))  # back, at the cost of the end of the second
    assert ledger.block_events() == (one, two[1:])
    sealed(ledger, list(range(300, 428)))
    sealed(ledger, list(range(64)))
    new = chain_hashes(ROOT, list(range(300, 428)))
    assert ledger.block_events() == (new[:1], two[:1])
    assert set(ledger.snapshot()) == {new[0], one[0]}


def test_a_span_of_two_units_is_told_gone_with_the_last():
    """Blocks of two spans: prompts alike in the first span only are two units, and both hold that span."""
    ledger = Ledger(2, 128)
    first, _ = sealed(ledger, list(range(128)))
    second, _ = sealed(ledger, [*range(64), *range(200, 264)])
    assert first[0] == second[0] and ledger.block_events() == ([*first, second[1]], [])
    ledger.release(ledger.allocate(1, Holder.RUNNING), Holder.RUNNING)  # evicts the first
    assert ledger.block_events() == ([], first[1:]) and sorted(ledger.snapshot()) == sorted(second)
    ledger.release(ledger.allocate(2, Holder.RUNNING), Holder.RUNNING)
    assert sorted(ledger.block_events()[1]) == sorted(second) and ledger.snapshot() == []
    ledger.check_integrity()
