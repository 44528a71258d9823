"""Sequences of a model whose layers all see a window, in few blocks: what lies outside it is given back while they run,
and is neither looked for in the cache nor fetched. Of a model with some such layers their part of blocks goes back, and
the blocks stay. The toy model checks every token that each layer is to see."""

import random

import pytest
import torch

from baton.engine.core.request import Refusal
from baton.engine.kv.ledger import Holder, Ledger
from baton.engine.kv.window import Window
from baton.engine.models.registry import read_spec
from baton.engine.schedule.sequence_blocks import SequenceBlocks
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import check_handed_over, copy_kv, going_on, hand_over
from tests.support.engine.late_launcher import LateLauncher
from tests.support.engine.serving import random_lives
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine
from tests.support.model_folders.families import make_folder

WINDOW = 40
SIZES = dict(num_blocks=48, max_num_seqs=3, max_model_len=768, max_num_batched_tokens=68)
ALL = dict(window=WINDOW) | SIZES
SOME = dict(windows=(WINDOW, WINDOW, WINDOW, None)) | SIZES
SHARED = [7 + index % 80 for index in range(300)]
PROMPT = [5 + index * 7 % 90 for index in range(600)]
each_kind = pytest.mark.parametrize("kind", [ALL, SOME], ids=["all", "some"])


def answer_of(request, kind):
    return toy_answer(request, kind.get("window", 1 << 30))


def num_held(engine) -> int:
    """Blocks, whole ones where parts of some are gone."""
    return engine.num_blocks - engine.ledger.num_left


def request_of(chance: random.Random, index: int):
    shared = SHARED[: chance.choice((0, 0, 64, 130, 300))]
    own = [chance.randrange(5, 90) for _ in range(chance.choice((1, 5, 40, 63, 64, 200)))]
    n, named = chance.choice((1, 1, 1, 2)), chance.random() < 0.8
    return engine_request(f"r{index}", shared + own, chance.choice((1, 3, 20, 150)), n=n, named=named)


@pytest.mark.parametrize("num_blocks", [48, 34])
@pytest.mark.parametrize("seed", range(4))
@each_kind
def test_random_lives_with_windows_answer_as_alone(kind, seed, num_blocks):
    """Submitted, cancelled, parked and resumed, preempted, found again in the cache."""
    engine = toy_engine(**kind | dict(num_blocks=num_blocks, max_model_len=544))
    for request, record in random_lives(engine, random.Random(seed), 100, request_of):
        assert record.answer() == answer_of(request, kind), request.key
    assert engine.ledger.num_available == num_blocks


@pytest.mark.parametrize("named", [True, False])
@each_kind
def test_a_long_sequence_holds_its_window(kind, named):
    engine, request = toy_engine(**kind), engine_request("a", PROMPT, 160, named=named)
    engine.submit(request)
    records, held = Collector(), []
    while engine.has_work():
        records.take(engine.step())
        engine.check_integrity()
        held.append((num_held(engine), engine.ledger.parts and engine.ledger.parts.num_used))
    assert records[request.key].answer() == answer_of(request, kind)
    most, in_window = engine.ledger.window.max_blocks(48), (WINDOW + 64) // 16 + 2
    assert most == (17 if kind is ALL else 25) and max(held)[0] <= most
    if kind is ALL:
        assert max(held[-100:])[0] <= in_window, "while it decodes: the window and a unit of the cache"
    else:
        assert max(seen for _, seen in held[-100:]) <= in_window
        assert max(held[-100:])[0] <= engine.ledger.window.in_whole_blocks(48, in_window) == 18, (
            "and a quarter of 48 others"
        )


@each_kind
def test_three_long_sequences_fit_where_one_would(kind):
    """None of them is preempted: 701 tokens of each are 44 blocks."""
    engine = toy_engine(**kind | (dict(num_blocks=54) if kind is SOME else {}))
    requests = [engine_request(f"r{i}", [i + 5, *PROMPT[:100]], 600) for i in range(3)]
    records = run_to_end(engine, requests)
    for request in requests:
        assert records[request.key].answer() == answer_of(request, kind)
        assert records[request.key].ended.report.num_preemptions == 0


@each_kind
def test_a_step_in_flight_may_still_look_at_what_was_given_back(kind):
    """Steps overlap: the toy model looks when a step is read, behind the launch of the next."""
    engine = toy_engine(**kind | dict(num_blocks=64))
    engine.runner.launcher = launcher = LateLauncher(engine.runner.model, engine.pool)
    requests = [engine_request(f"r{i}", PROMPT[i : 200 + i], 300) for i in range(3)]
    records = run_to_end(engine, requests)
    assert launcher.num_overlapped > 100
    for request in requests:
        assert records[request.key].answer() == answer_of(request, kind)


@pytest.mark.parametrize("part_bytes", [1, 2])
def test_blocks_that_changed_have_no_table(part_bytes):
    """It was kept where shared blocks were appended and skipped blocks stay."""
    ledger, blocks = Ledger(8, 16, window=Window(64, 16, block_bytes=2, part_bytes=part_bytes)), SequenceBlocks()
    shared = ledger.allocate(1, Holder.RUNNING)
    for change in (
        lambda: blocks.allocate(2, ledger, Holder.RUNNING),
        lambda: blocks.extend(shared, 0, ledger, Holder.RUNNING),
        lambda: ledger.release(blocks.cut(1), Holder.RUNNING),
        lambda: blocks.begin_after_skipped(1, ledger, Holder.RUNNING),
    ):
        blocks.table = torch.tensor(blocks.ids)
        change()
        assert blocks.table is None


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
    engine = toy_engine(**ALL | dict(num_blocks=50))
    run_to_end(engine, [engine_request("a", PROMPT, 2), engine_request("other", SHARED, 2)])
    second = engine_request("b", PROMPT, 20)
    assert len(engine.ledger.find(second.span_hashes, 600, whole=True)) < 36, "its first blocks are gone"
    records = run_to_end(engine, [second])
    assert records[second.key].first.num_cached_tokens == 576
    assert records[second.key].answer() == toy_answer(second, WINDOW)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 129, 250, 600])
@pytest.mark.parametrize("n", [1, 3])
@each_kind
def test_decode_after_handoff_equals_whole(kind, num_tokens, n):
    """Only the window crosses, where all layers have one; the whole prompt crosses to who wants all of it."""
    options = kind | dict(max_num_seqs=4, num_blocks=96)
    requests = [engine_request(f"r{i}", [5 + (i + at) % 80 for at in range(num_tokens)], 60, n=n) for i in range(2)]
    prefill, decode = toy_engine(**options), toy_engine(**options)
    firsts, rest = hand_over(prefill, decode, requests)
    for request in requests:
        whole = run_to_end(toy_engine(**options), [request])[request.key]
        assert whole.answer() == answer_of(request, kind)
        check_handed_over(firsts, rest, request, whole)
    for engine in (prefill, decode):
        engine.check_integrity()
        assert engine.ledger.num_available == 96
    if kind is ALL:
        assert len(decode.ledger.cache.blocks()) <= decode.layout.num_blocks(2 * n * (WINDOW + 64 + 64 + 60))


def test_what_was_fetched_leaves_its_window_as_it_comes():
    """A decode worker holds a part of a block as long as a fetch may write there, and then what tokens to come see."""
    prefill, decode = toy_engine(**SOME), toy_engine(**SOME)
    request, window = engine_request("a", PROMPT, 20), decode.ledger.window
    decode.admission.admit(request)
    acceptance, firsts = prefill.admission.accept(request), Collector()
    while firsts[request.key].first is None:
        firsts.take(prefill.step())
    assert prefill.ledger.parts.num_used == 38, "a lease is of whole blocks"
    refs, held = decode.admission.set_aside(request.key, 600), []
    copy_kv(prefill, acceptance.blocks, decode, refs)
    for upto in (*range(64, 600, 64), 600, 600):
        decode.admission.verify(request.key, upto)
        decode.check_integrity()
        held.append(decode.ledger.parts.num_used)
    assert held == [38, 38, 34, 30, 26, 22, 18, 14, 10, 6, 6]
    decode.admission.fetch_settled(request.key)
    decode.admission.start(request.key, going_on(firsts[request.key].first))
    rest = run_to_end(decode, collector=Collector(first_index=1))
    tokens = toy_answer(request)[0][0]
    assert rest[request.key].tokens[0] == tokens[1:] and window.in_whole_blocks(38, 6) == 14


def test_a_prompt_that_is_fetched_whole_is_promised_blocks_for_all_of_it():
    """That is one of whose tokens something is asked: it could not be read here behind what was skipped."""
    engine, whole = toy_engine(**ALL), engine_request("a", PROMPT, 20, prompt_logprobs=0)
    engine.admission.admit(whole)
    with pytest.raises(Refusal):
        for index in range(5):
            engine.admission.admit(engine_request(f"r{index}", PROMPT, 20, named=False))
    assert engine.admission.skip(whole.key, 600) == 0
    assert len(engine.admission.set_aside(whole.key, 600)) == 38
    engine.check_integrity()


@pytest.mark.parametrize("n", [1, 3])
def test_what_was_fetched_is_promised_its_growth_alone(n):
    """The promise to read a prompt in chunks ends with its fetch, which took a window's blocks of it."""
    prefill, decode = toy_engine(**ALL | dict(num_blocks=64)), toy_engine(**ALL | dict(num_blocks=64))
    request, firsts = engine_request("a", PROMPT, 20, n=n), Collector()
    decode.admission.admit(request)
    acceptance = prefill.admission.accept(request)
    while firsts[request.key].first is None:
        firsts.take(prefill.step())
    skipped = decode.admission.skip(request.key, 600) // 16
    refs = decode.admission.set_aside(request.key, 600)
    copy_kv(prefill, acceptance.blocks[skipped:], decode, refs[skipped:])
    decode.admission.verify(request.key, 600)
    decode.admission.fetch_settled(request.key)
    decode.admission.start(request.key, going_on(firsts[request.key].first))
    decode.check_integrity()
    assert decode.ledger.num_reserved == n * 1 + (n - 1), "620 tokens are 39 blocks, and each choice has a tail"
    rest = run_to_end(decode, collector=Collector(first_index=1))
    for choice, (tokens, _) in answer_of(request, ALL).items():
        assert rest[request.key].tokens[choice] == tokens[1:]
    assert decode.ledger.num_available == 64


@pytest.mark.parametrize("brought", [0, 576, 592, 600])
@pytest.mark.parametrize("settled", [False, True])
@each_kind
def test_a_fetch_that_failed_goes_on_with_local_prefill(kind, brought, settled):
    """What was skipped is read here, unless all that is seen has come."""
    kind = kind | (dict(num_blocks=64) if kind is SOME else {})  # a fetch that may still write has its own
    prefill, decode = toy_engine(**kind), toy_engine(**kind)
    request = engine_request("a", PROMPT, 20)
    decode.admission.admit(request)
    acceptance, firsts = prefill.admission.accept(request), Collector()
    while firsts[request.key].first is None:
        firsts.take(prefill.step())
    skipped = decode.admission.skip(request.key, 600)
    assert skipped == (512 if "window" in kind else 0) == decode.admission.skip(request.key, 600)
    refs = decode.admission.set_aside(request.key, 600)
    decode.check_integrity()
    assert decode.ledger.counts()["fetching"] == 38 - skipped // 16
    if brought:
        copy_kv(prefill, acceptance.blocks[skipped // 16 :], decode, refs[skipped // 16 :])
        decode.admission.verify(request.key, brought)
        decode.check_integrity()
    if settled:
        decode.admission.fetch_settled(request.key)
    decode.admission.compute_rest(request.key)
    decode.check_integrity()
    records = run_to_end(decode)
    assert records[request.key].answer() == answer_of(request, kind)
    assert records[request.key].first.num_chunks == (1 if brought else 10)
    decode.admission.fetch_settled(request.key)
    decode.check_integrity()
    assert decode.ledger.num_available == decode.num_blocks


def test_a_taker_may_have_all_of_a_prompt_that_was_found_cached():
    """A lease is of whole prompts: the source looks for whole prefixes, whatever is left of others."""
    engine = toy_engine(**ALL | dict(num_blocks=50))
    run_to_end(engine, [engine_request("a", PROMPT, 2), engine_request("other", SHARED, 2)])
    request = engine_request("b", PROMPT, 20)
    acceptance = engine.admission.accept(request)
    assert acceptance.num_cached_tokens == 0 and len({ref.block_id for ref in acceptance.blocks}) == 38
    firsts = Collector()
    while firsts[request.key].first is None:
        firsts.take(engine.step())
        engine.check_integrity()
    assert engine.ledger.counts()["leased"] == 38
    assert going_on(firsts[request.key].first)[0].token_id == toy_answer(request, WINDOW)[0][0][0]
    engine.admission.release_lease(request.key)
    run_to_end(engine)
    assert engine.ledger.num_available == 50


def test_parts_that_went_back_are_computed_again():
    """Another prompt has taken the room of what a long sequence had left. Its next turn goes on where it ended; a
    taker, an offer and a prompt that ends sooner find less, and the units that are read again take their names."""
    engine = toy_engine(**SOME)
    request, other = engine_request("a", PROMPT, 150), engine_request("other", [3, *PROMPT[:-1]], 2)
    records = run_to_end(engine, [request, other])
    assert records[request.key].ended.report.num_preemptions == 0
    turn = engine_request("turn", [*PROMPT, *records[request.key].tokens[0]], 10)
    assert len(engine.ledger.find(turn.span_hashes, 750)) == 44
    assert engine.ledger.find(turn.span_hashes, 750, whole=True) == []
    shorter = engine_request("b", PROMPT[:320], 2)
    assert engine.ledger.find(shorter.span_hashes, 320) == []
    assert not engine.admission.offer(engine_request("o", [1]).key, turn.span_hashes).blocks
    records = run_to_end(engine, [turn, shorter])
    assert records[shorter.key].first.num_chunks == 5
    assert [records[each.key].first.num_cached_tokens for each in (turn, shorter)] == [704, 0]
    for each in (turn, shorter):
        assert records[each.key].answer() == toy_answer(each)
    assert len(engine.ledger.find(shorter.span_hashes, 320)) == 16, "these have all their parts"
    acceptance = engine.admission.offer(engine_request("p", [1]).key, shorter.span_hashes)
    assert len(acceptance.blocks) == 20 and engine.ledger.parts.num_used == 20
    engine.check_integrity()
    engine.admission.release_lease(engine_request("p", [1]).key)
    assert engine.ledger.num_available == 48


@pytest.mark.parametrize(
    ("name", "window", "part"),
    [("mistral", 24, None), ("phi3", 40, None), ("starcoder2", 40, None), ("llama3", None, None), ("mamba2", None, None)]
    + [(name, None, 24) for name in ("ministral", "gemma2", "gemma3", "olmo3", "command-r7b", "exaone4", "gpt-oss", "llama4")],
)  # fmt: skip
def test_which_models_give_blocks_back(tmp_path, name, window, part):
    """Those without a layer that sees all; of those with both kinds parts go back."""
    make_folder(tmp_path, name)
    spec = read_spec(tmp_path)
    assert (spec.kv_window, spec.partial_window) == (window, part)
