"""Sequences whose model keeps a state, in few blocks: whatever happens to them, a state is that of its own tokens,
every block of states has its holder, and answers are those of a request alone. The toy model looks at each state it is
given."""

import random

import pytest

from baton.engine.kv.ledger import Holder
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import check_handed_over, copy_kv, going_on, hand_over
from tests.support.engine.serving import random_lives
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine

OPTIONS = dict(num_states=6, max_num_seqs=3, num_blocks=48, max_model_len=512, checkpoint_tokens=64)
SHARED = [7 + index % 80 for index in range(200)]


def request_of(chance: random.Random, index: int):
    shared = SHARED[: chance.choice((0, 0, 64, 130, 200))]
    own = [chance.randrange(5, 90) for _ in range(chance.choice((1, 5, 40, 63, 64, 100)))]
    return engine_request(f"r{index}", shared + own, chance.choice((1, 3, 20, 70)), n=chance.choice((1, 1, 1, 2)))


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_with_states_answer_as_alone(seed):
    """Submitted, cancelled, parked and resumed, preempted, found again in the cache."""
    engine = toy_engine(**OPTIONS)
    for request, record in random_lives(engine, random.Random(seed), 60, request_of):
        assert record.answer() == toy_answer(request), request.key
    assert engine.ledger.states.counts()["running"] == 0 and engine.ledger.states.num_reserved == 0


def test_the_same_prompt_begins_where_its_last_checkpoint_stands():
    engine = toy_engine(**OPTIONS)
    first, second = (engine_request(name, SHARED, 4) for name in "ab")
    run_to_end(engine, [first])
    records = run_to_end(engine, [second])
    assert records[second.key].first.num_cached_tokens == 192  # whole spans of 199 tokens
    assert records[second.key].answer() == toy_answer(second)


def test_checkpoints_stand_where_blocks_of_more_than_a_span_end():
    """Behind the last one of a prompt, and at each step: 192 tokens are 256 there."""
    options = OPTIONS | dict(block_size=128, max_model_len=1024)
    engine = toy_engine(**(options | dict(checkpoint_tokens=512)))
    run_to_end(engine, [engine_request("a", SHARED, 4)])
    assert run_to_end(engine, [request := engine_request("b", SHARED, 4)])[request.key].first.num_cached_tokens == 128
    engine = toy_engine(**(options | dict(checkpoint_tokens=192)))
    run_to_end(engine, [engine_request("a", [*SHARED, *SHARED], 4)])
    request = engine_request("b", [*SHARED, *SHARED[:100], *range(10, 60)], 4)
    record = run_to_end(engine, [request])[request.key]
    assert record.first.num_cached_tokens == 256 and record.answer() == toy_answer(request)


def test_without_a_checkpoint_nothing_is_found():
    """KV is cached, and the state that stood behind it is not."""
    engine = toy_engine(**(OPTIONS | dict(num_states=2, max_num_seqs=2)))
    run_to_end(engine, [engine_request("a", SHARED, 4)])
    held = [engine.ledger.states.allocate(2, Holder.RUNNING)]
    assert held[0] is not None and engine.ledger.find(engine_request("b", SHARED).span_hashes, 200) == []
    engine.ledger.states.release(held[0], Holder.RUNNING)


@pytest.mark.parametrize(("num_states", "n"), [(2, 2), (4, 4), (4, 8)])
def test_choices_that_find_no_state_wait_for_one(num_states, n):
    """Also where a block is taken by the checkpoint that they begin from, and where a fetch brought nothing."""
    engine = toy_engine(**(OPTIONS | dict(max_num_seqs=8, num_states=num_states)))
    run_to_end(engine, [engine_request("before", SHARED, 4)])
    for name in ("from a checkpoint", "once more"):
        request = engine_request(name, SHARED, 12, n=n)
        record = run_to_end(engine, [request])[request.key]
        assert record.answer() == toy_answer(request)
        assert record.first.num_cached_tokens == 192 or name == "once more"
    request = engine_request("fetched", [*SHARED, *range(10, 60)], 6, n=n)
    engine.admission.admit(request)
    engine.admission.set_aside(request.key, 250)
    engine.admission.fetch_settled(request.key)
    engine.admission.compute_rest(request.key)
    assert run_to_end(engine)[request.key].answer() == toy_answer(request)
    assert engine.ledger.states.num_available == num_states


@pytest.mark.parametrize("num_tokens", [1, 30, 64, 65, 128, 129, 250])
@pytest.mark.parametrize("n", [1, 3])
def test_decode_after_handoff_equals_whole(num_tokens, n):
    options = OPTIONS | dict(max_num_seqs=4, num_states=8)
    requests = [engine_request(f"r{i}", [5 + (i + at) % 80 for at in range(num_tokens)], 12, n=n) for i in range(2)]
    prefill, decode = toy_engine(**options), toy_engine(**options)
    firsts, rest = hand_over(prefill, decode, requests)
    for request in requests:
        whole = run_to_end(toy_engine(**options), [request])[request.key]
        check_handed_over(firsts, rest, request, whole)
    for engine in (prefill, decode):
        engine.check_integrity()
        assert engine.ledger.states.num_available == 8


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("brought", ["nothing", "all"])
def test_a_fetch_that_failed_goes_on_with_local_prefill(brought, settled):
    """`all`: verified to the end, but nobody said the first token: the state stands one token too far."""
    prefill, decode = toy_engine(**OPTIONS), toy_engine(**OPTIONS)
    request = engine_request("a", SHARED, 20)
    decode.admission.admit(request)
    acceptance = prefill.admission.accept(request)
    firsts = Collector()
    while firsts[request.key].first is None:
        firsts.take(prefill.step())
    refs = decode.admission.set_aside(request.key, 200)
    decode.check_integrity()
    if brought == "all":
        copy_kv(prefill, acceptance.blocks, decode, refs)
        copy_states(prefill, acceptance.states, decode, request.key)
        decode.admission.verify(request.key, 200)
    if settled:
        decode.admission.fetch_settled(request.key)
    decode.admission.compute_rest(request.key)
    decode.check_integrity()
    records = run_to_end(decode)
    assert records[request.key].answer() == toy_answer(request)
    decode.admission.fetch_settled(request.key)
    decode.check_integrity()
    assert decode.ledger.states.num_available == 6


def copy_states(source, refs, target, key) -> None:
    for ours, theirs in zip(refs, target.admission.state_blocks(key), strict=True):
        target.pool.states.of(theirs.block_id).copy_(source.pool.states.of(ours.block_id))


@pytest.mark.parametrize("n", [1, 2])
def test_a_decode_worker_goes_on_behind_the_prefix_that_it_pulled(n):
    """Its checkpoint's block is the prompt's: no more are wanted than were promised."""
    holder, reader = toy_engine(**OPTIONS), toy_engine(**(OPTIONS | dict(num_states=2)))
    run_to_end(holder, [engine_request("before", SHARED, 4)])
    request, offer = engine_request("a", [*SHARED, *range(10, 60)], 6, n=n), engine_request("offer", SHARED)
    offered = holder.admission.offer(offer.key, request.span_hashes)
    reader.admission.admit(request)
    reader.admission.begin_fetch(request.key)
    copy_kv(holder, offered.blocks, reader, reader.admission.set_aside(request.key, 192))
    copy_states(holder, offered.states, reader, request.key)
    reader.admission.verify(request.key, 192)
    reader.admission.fetch_settled(request.key)
    reader.admission.compute_rest(request.key)
    reader.check_integrity()
    record = run_to_end(reader)[request.key]
    assert record.answer() == toy_answer(request)
    assert record.first.num_cached_tokens == 192
    assert sum(tokens for _, tokens in reader.runner.model.batch_sizes) == 250 - 192 + n * 5
    holder.admission.release_lease(offer.key)
    assert reader.ledger.states.num_available == 2


@pytest.mark.parametrize("arrives", [True, False])
def test_a_prefix_is_pulled_with_its_checkpoint(arrives):
    holder, reader = toy_engine(**OPTIONS), toy_engine(**OPTIONS)
    run_to_end(holder, [engine_request("before", SHARED, 4)])
    request = engine_request("a", [*SHARED, *range(10, 60)], 6)
    offered = holder.admission.offer(engine_request("offer", SHARED).key, request.span_hashes)
    assert offered.num_cached_tokens == 192 and len(offered.states) == 1
    acceptance = reader.admission.accept(request, fetches=True)
    reader.admission.begin_fetch(request.key)
    refs = reader.admission.set_aside(request.key, 192)
    if arrives:
        copy_kv(holder, offered.blocks, reader, refs)
        copy_states(holder, offered.states, reader, request.key)
        reader.admission.verify(request.key, 192)
    reader.admission.fetch_settled(request.key)
    if arrives:  # a second source would go through the state that is here
        with pytest.raises(LookupError):
            reader.admission.begin_fetch(request.key)
    reader.admission.compute_rest(request.key)
    reader.check_integrity()
    firsts = Collector()
    while firsts[request.key].first is None:
        firsts.take(reader.step())
        reader.check_integrity()
    assert firsts[request.key].first.num_cached_tokens == (192 if arrives else 0)
    (first,) = going_on(firsts[request.key].first)
    assert first.token_id == toy_answer(request)[0][0][0]
    state = reader.pool.states.of(acceptance.states[0].block_id)[0]
    assert state[0] == len(request.token_ids), "the lease is on the state behind the last token"
    holder.admission.release_lease(engine_request("offer", SHARED).key)
    reader.admission.release_lease(request.key)
    for engine in (holder, reader):
        run_to_end(engine)
        assert engine.ledger.states.counts()["leased"] == 0
