"""Sequences of a model whose layers all see a window, in few blocks: what lies outside it is given back while they run, and is
neither looked for in the cache nor fetched. The toy model checks every token that it is to see."""

import random

import pytest

from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.kv.window import Window
from baton.engine.models.registry import read_spec
from tests.support.engine.folders import make_folder
from tests.support.engine.toys import (
    Collector,
    LateLauncher,
    check_handed_over,
    copy_kv,
    going_on,
    hand_over,
    make_request,
    random_lives,
    run,
    toy_answer,
    toy_engine,
)

WINDOW = 40
OPTIONS = dict(window=WINDOW, num_blocks=48, max_num_seqs=3, max_model_len=768, max_num_batched_tokens=68)
SHARED = [7 + index % 80 for index in range(300)]
PROMPT = [5 + index * 7 % 90 for index in range(600)]
MOST = Window(WINDOW, 16, 68).most_blocks(1 << 30)


def request_of(chance: random.Random, index: int):
    shared = SHARED[: chance.choice((0, 0, 64, 130, 300))]
    own = [chance.randrange(5, 90) for _ in range(chance.choice((1, 5, 40, 63, 64, 200)))]
    n, named = chance.choice((1, 1, 1, 2)), chance.random() < 0.8
    return make_request(f"r{index}", shared + own, chance.choice((1, 3, 20, 150)), n=n, named=named)


@pytest.mark.parametrize("num_blocks", [48, 34])
@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed, num_blocks):
    """Submitted, cancelled, parked and resumed, preempted, found again in the cache."""
    engine = toy_engine(**OPTIONS | dict(num_blocks=num_blocks, max_model_len=544))
    for request, record in random_lives(engine, random.Random(seed), 100, request_of):
        assert record.answer() == toy_answer(request, WINDOW), request.key
    assert engine.ledger.num_available == num_blocks


@pytest.mark.parametrize("named", [True, False])
def test_a_long_sequence_holds_its_window(named):
    engine, request = toy_engine(**OPTIONS), make_request("a", PROMPT, 160, named=named)
    engine.submit(request)
    records, held = Collector(), []
    while engine.has_work():
        records.take(engine.step())
        engine.check_integrity()
        held.append(engine.ledger.counts()["running"])
    assert records[request.key].answer() == toy_answer(request, WINDOW)
    assert max(held) <= MOST < engine.layout.num_blocks(len(PROMPT))
    assert max(held[-100:]) <= (WINDOW + 64) // 16 + 2, "while it decodes: the window and a unit of the cache"


def test_three_long_sequences_fit_where_one_would():
    """None of them parks: 760 tokens of each are 48 blocks."""
    engine = toy_engine(**OPTIONS)
    requests = [make_request(f"r{i}", [i + 5, *PROMPT[:100]], 600) for i in range(3)]
    records = run(engine, requests)
    for request in requests:
        assert records[request.key].answer() == toy_answer(request, WINDOW)
        assert records[request.key].ended.report.num_preemptions == 0


def test_a_step_in_flight_may_still_look_at_what_was_given_back():
    """Steps overlap: the toy model looks when a step is read, behind the launch of the next."""
    engine = toy_engine(**OPTIONS | dict(num_blocks=64))
    engine.runner.launcher = launcher = LateLauncher(engine.runner.model, engine.pool)
    requests = [make_request(f"r{i}", PROMPT[i : 200 + i], 300) for i in range(3)]
    records = run(engine, requests)
    assert launcher.num_overlapped > 100
    for request in requests:
        assert records[request.key].answer() == toy_answer(request, WINDOW)


def test_a_prefix_is_found_by_its_window():
    """The first units of a prompt are evicted, those before its end are not."""
    ledger = Ledger(16, 16, window=Window(70, 16))
    names = [bytes([index]) * 32 for index in range(3)]
    for name in names:
        block_ids = ledger.allocate(4, Holder.RUNNING)
        ledger.seal((name,), tuple(block_ids))
        ledger.release(block_ids, Holder.RUNNING)
    kept = ledger.find(names, 193)
    assert kept[:7] == [kept[7]] * 7 and len(set(kept)) == 5 and len(kept) == 12, "192 - 69 tokens are outside"
    ledger.allocate(8, Holder.RUNNING)  # four free ones, and the unit that was used longest ago
    assert ledger.find(names, 193) == kept and ledger.find(names, 193, whole=True) == []
    assert ledger.find(names, 192) == [] and ledger.find(names[:1], 193) == []
    ledger.allocate(4, Holder.RUNNING)
    assert ledger.find(names, 193) == []


def test_the_same_prompt_again_begins_at_its_window():
    engine = toy_engine(**OPTIONS | dict(num_blocks=50))
    run(engine, [make_request("a", PROMPT, 2), make_request("other", SHARED, 2)])
    second = make_request("b", PROMPT, 20)
    assert len(engine.ledger.find(second.span_hashes, 600, whole=True)) < 36, "its first blocks are gone"
    records = run(engine, [second])
    assert records[second.key].first.num_cached_tokens == 576
    assert records[second.key].answer() == toy_answer(second, WINDOW)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 129, 250, 600])
@pytest.mark.parametrize("n", [1, 3])
def test_handed_over(num_tokens, n):
    """Only the window crosses; the whole prompt crosses to who wants all of it."""
    options = OPTIONS | dict(max_num_seqs=4, num_blocks=96)
    requests = [make_request(f"r{i}", [5 + (i + at) % 80 for at in range(num_tokens)], 60, n=n) for i in range(2)]
    prefill, decode = toy_engine(**options), toy_engine(**options)
    firsts, rest = hand_over(prefill, decode, requests)
    for request in requests:
        whole = run(toy_engine(**options), [request])[request.key]
        assert whole.answer() == toy_answer(request, WINDOW)
        check_handed_over(firsts, rest, request, whole)
    for engine in (prefill, decode):
        engine.check_integrity()
        assert engine.ledger.num_available == 96
    assert len(decode.ledger.cache.blocks()) <= decode.layout.num_blocks(2 * n * (WINDOW + 64 + 64 + 60))


@pytest.mark.parametrize("brought", [0, 576, 592, 600])
@pytest.mark.parametrize("settled", [False, True])
def test_a_fetch_that_failed_goes_on_with_local_prefill(brought, settled):
    """What was skipped is read here, unless all that is seen has come."""
    prefill, decode = toy_engine(**OPTIONS), toy_engine(**OPTIONS)
    request = make_request("a", PROMPT, 20)
    decode.admission.admit(request)
    acceptance, firsts = prefill.admission.accept(request), Collector()
    while firsts[request.key].first is None:
        firsts.take(prefill.step())
    assert decode.admission.skip(request.key, 600) == 512 == decode.admission.skip(request.key, 600)
    refs = decode.admission.set_aside(request.key, 600)
    decode.check_integrity()
    assert decode.ledger.counts()["fetching"] == 6
    if brought:
        copy_kv(prefill, acceptance.blocks[32:], decode, refs[32:])
        decode.admission.verified(request.key, brought)
        decode.check_integrity()
    if settled:
        decode.admission.fetch_settled(request.key)
    decode.admission.compute_rest(request.key)
    decode.check_integrity()
    records = run(decode)
    assert records[request.key].answer() == toy_answer(request, WINDOW)
    assert records[request.key].first.num_chunks == (1 if brought else 10)
    decode.admission.fetch_settled(request.key)
    decode.check_integrity()
    assert decode.ledger.num_available == 48


def test_a_taker_may_have_all_of_a_prompt_that_was_found_cached():
    """A lease is of whole prompts: the source looks for whole prefixes, whatever is left of others."""
    engine = toy_engine(**OPTIONS | dict(num_blocks=50))
    run(engine, [make_request("a", PROMPT, 2), make_request("other", SHARED, 2)])
    request = make_request("b", PROMPT, 20)
    acceptance = engine.admission.accept(request)
    assert acceptance.num_cached_tokens == 0 and len({ref.block_id for ref in acceptance.blocks}) == 38
    firsts = Collector()
    while firsts[request.key].first is None:
        firsts.take(engine.step())
        engine.check_integrity()
    assert engine.ledger.counts()["leased"] == 38
    assert going_on(firsts[request.key].first)[0].token_id == toy_answer(request, WINDOW)[0][0][0]
    engine.admission.release_lease(request.key)
    run(engine)
    assert engine.ledger.num_available == 50


@pytest.mark.parametrize(
    ("name", "window"),
    [("mistral", 24), ("phi3", 40), ("starcoder2", 40), ("ministral", None), ("gemma3", None), ("mamba2", None)],
)
def test_which_models_give_blocks_back(tmp_path, name, window):
    """Those without a layer that sees all."""
    make_folder(tmp_path, name)
    assert read_spec(tmp_path).kv_window == window
