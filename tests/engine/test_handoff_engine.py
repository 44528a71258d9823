"""Prefill in one engine, decode in another, blocks copied between their pools as a transport would."""

import random

import pytest

from baton.engine.core.request import FinishReason, Key, PrefillDone, Refusal, RequestEnded
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import copy_kv, going_on
from tests.support.engine.serving import check_answers
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine, toy_prompt


class Pair:
    """A prefill and a decode engine, and a transfer that follows the watermark."""

    def __init__(self, prefill_options=(), decode_options=()):
        self.prefill = toy_engine(**dict(prefill_options))
        self.decode = toy_engine(**dict(decode_options))
        self.from_prefill, self.from_decode = Collector(), Collector()

    def check_integrity(self):
        self.prefill.check_integrity()
        self.decode.check_integrity()

    def begin(self, request) -> int:
        """Admit, accept and fetch nothing yet; the tokens cached on the decode side."""
        self.cached = self.decode.admission.admit(request)
        self.acceptance = self.prefill.admission.accept(request)
        self.fetched = self.cached
        return self.cached

    def fetch(self, request, upto_token: int) -> None:
        """Moves what the watermark allows, whole blocks (and the tail at the end)."""
        block_size = self.decode.layout.block_size
        whole = upto_token == len(request.token_ids)
        upto_token = upto_token if whole else upto_token // block_size * block_size
        if upto_token <= self.fetched:
            return
        refs = self.decode.admission.set_aside(request.key, upto_token)
        first, last = self.fetched // block_size, -(-upto_token // block_size)
        self.check_integrity()
        copy_kv(self.prefill, self.acceptance.blocks[first:last], self.decode, refs[first:last])
        self.decode.admission.verify(request.key, upto_token)
        self.check_integrity()
        self.fetched = upto_token

    def hand_off(self, request) -> PrefillDone:
        """The whole way up to `start`."""
        self.begin(request)
        self.fetch(request, self.acceptance.num_cached_tokens)
        while (done := self.from_prefill[request.key].first) is None:
            outputs = self.prefill.step()
            self.from_prefill.take(outputs)
            if progress := self.from_prefill[request.key].progress:
                self.fetch(request, progress[-1])
        self.decode.admission.fetch_settled(request.key)
        if going_on(done):
            self.decode.admission.start(request.key, going_on(done))
        self.prefill.admission.release_lease(request.key)
        self.from_prefill.take(self.prefill.step())
        return done

    def answer(self, request) -> dict:
        """First tokens of the one, the rest of the other."""
        done, rest = self.from_prefill[request.key].first, self.from_decode[request.key]
        tokens = {first.choice: [first.token_id] for first in done.first_tokens}
        reasons = {first.choice: first.finish_reason for first in done.first_tokens} | rest.reasons
        for choice, more in rest.tokens.items():
            tokens[choice] += more
        return {choice: (tokens[choice], reasons[choice]) for choice in tokens}


@pytest.mark.parametrize("num_tokens", [1, 30, 64, 65, 128, 129, 250])
@pytest.mark.parametrize("n", [1, 3])
def test_split_equals_whole(num_tokens, n):
    pair = Pair({"max_num_batched_tokens": 68})
    pair.from_decode = Collector(first_index=1)
    request = engine_request("a", toy_prompt(num_tokens), max_tokens=40, n=n, temperature=1.0, seed=5)
    done = pair.hand_off(request)
    assert done.num_cached_tokens == 0
    run_to_end(pair.decode, collector=pair.from_decode)
    assert pair.answer(request) == toy_answer(request)
    for record in (pair.from_prefill[request.key], pair.from_decode[request.key]):
        assert record.ended is not None and not record.ended.error
    for engine in (pair.prefill, pair.decode):
        assert engine.ledger.num_available == engine.num_blocks
    # a second time both sides have it, all but what holds the last token
    cached = (num_tokens - 1) // 64 * 64
    again = engine_request("b", toy_prompt(num_tokens), max_tokens=3)
    assert pair.hand_off(again).num_cached_tokens == cached == pair.cached
    run_to_end(pair.decode, collector=pair.from_decode)
    assert pair.answer(again) == toy_answer(again)


def test_choices_that_ended_with_their_first_token_do_not_start():
    options = dict(max_tokens=30, n=4, temperature=2.0, seed=1)
    firsts = [tokens[0] for tokens, _ in toy_answer(engine_request("a", toy_prompt(70), **options)).values()]
    assert len(set(firsts)) > 1
    request = engine_request("a", toy_prompt(70), stop_token_ids=frozenset(firsts[:1]), **options)
    pair = Pair()
    pair.from_decode = Collector(first_index=1)
    done = pair.hand_off(request)
    assert done.first_tokens[0].finish_reason is FinishReason.STOP and 0 < len(going_on(done)) < 4
    run_to_end(pair.decode, collector=pair.from_decode)
    assert pair.answer(request) == toy_answer(request)
    assert pair.decode.ledger.num_available == pair.decode.num_blocks


def test_a_prompt_whose_first_tokens_are_its_last_is_held_until_released():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(70), max_tokens=1)
    engine.admission.accept(request)
    records = run_until_done(engine, request)
    assert records[request.key].first.first_tokens[0].finish_reason is FinishReason.LENGTH
    assert engine.load_report().blocks_by_holder["leased"] == 5 and records[request.key].ended is None
    engine.admission.release_lease(request.key)
    engine.admission.release_lease(request.key)
    assert engine.load_report().blocks_by_holder["leased"] == 0
    records.take(engine.step())
    assert records[request.key].ended.error == ""
    engine.check_integrity()


def test_start_without_choices_ends_the_key():
    pair = Pair()
    request = engine_request("a", toy_prompt(70), max_tokens=1)
    pair.hand_off(request)
    pair.decode.admission.start(request.key, ())
    records = run_to_end(pair.decode)
    assert records[request.key].ended.error == "" and not records[request.key].tokens
    assert pair.decode.ledger.num_available == pair.decode.num_blocks


def run_until_done(engine, request) -> Collector:
    records = Collector()
    while records[request.key].first is None:
        records.take(engine.step())
        engine.check_integrity()
    return records


def test_credit_counts_what_is_missing_and_growth():
    engine = toy_engine(num_blocks=32)
    engine.admission.admit(engine_request("a", toy_prompt(100), max_tokens=30))
    assert engine.ledger.num_reserved == 7 + 2  # 100 tokens, and 30 more
    engine.admission.admit(engine_request("b", toy_prompt(100, 2), max_tokens=400))
    assert engine.ledger.num_reserved == 9 + 7 + 4  # 64 more, as outputs were guessed to be
    with pytest.raises(Refusal) as refusal:
        engine.admission.admit(engine_request("c", toy_prompt(300, 3)))
    assert refusal.value.reason == "kv_full"
    engine.cancel(Key("b"))
    assert engine.ledger.num_reserved == 9
    engine.check_integrity()


def test_growth_is_learned_from_what_was_observed():
    engine = toy_engine()
    for index in range(80):
        run_to_end(engine, [engine_request(f"r{index}", toy_prompt(10, index), max_tokens=2)])
    engine.admission.admit(engine_request("a", toy_prompt(16), max_tokens=400))
    assert engine.ledger.num_reserved == 1 + 1


def test_a_cached_prefix_is_pinned_by_the_grant():
    pair = Pair(decode_options={"num_blocks": 16, "max_model_len": 256})
    first = engine_request("a", toy_prompt(128), max_tokens=2)
    pair.hand_off(first)
    run_to_end(pair.decode, collector=Collector(first_index=1))
    second = engine_request("b", toy_prompt(128) + toy_prompt(20, 3), max_tokens=4)
    assert pair.begin(second) == 128
    assert pair.decode.load_report().blocks_by_holder["running"] == 8
    crowd = engine_request("crowd", toy_prompt(80, 9), max_tokens=1)
    run_to_end(pair.decode, [crowd])  # takes what else there is, not the pinned blocks
    refs = pair.decode.admission.set_aside(second.key, 148)
    assert len(refs) == 10
    assert pair.decode.load_report().blocks_by_holder["fetching"] == 2
    pair.check_integrity()


@pytest.mark.parametrize("settled_first", [False, True])
def test_a_cancelled_fetch_is_quarantined_until_it_has_settled(settled_first):
    engine = toy_engine(num_blocks=16, max_model_len=256)
    request = engine_request("a", toy_prompt(120))
    engine.admission.admit(request)
    engine.admission.set_aside(request.key, 64)
    engine.admission.verify(request.key, 32)
    engine.admission.set_aside(request.key, 120)
    if settled_first:
        engine.admission.fetch_settled(request.key)
    engine.cancel(request.key)
    engine.check_integrity()
    counts = engine.load_report().blocks_by_holder
    assert counts["quarantined"] == (0 if settled_first else 6) and counts["fetching"] == counts["running"] == 0
    assert engine.ledger.num_available == (16 if settled_first else 10)
    for late in (
        lambda: engine.admission.set_aside(request.key, 120),
        lambda: engine.admission.verify(request.key, 64),
    ):
        with pytest.raises(LookupError, match="not admitted here"):
            late()
    engine.admission.fetch_settled(request.key)
    engine.admission.fetch_settled(request.key)
    assert engine.ledger.num_available == 16
    (ended,) = engine.step()
    assert ended == RequestEnded(request.key, "cancelled", "", ended.report)


def test_generations_tell_a_block_that_was_given_out_again():
    engine = toy_engine(num_blocks=4, max_model_len=64)
    first, second = (engine_request(name, toy_prompt(60, seed), max_tokens=4) for seed, name in enumerate("ab"))
    engine.admission.admit(first)
    before = engine.admission.set_aside(first.key, 60)
    assert all(engine.ledger.generation(ref.block_id) == ref.generation for ref in before)
    engine.cancel(first.key)
    engine.admission.fetch_settled(first.key)
    engine.admission.admit(second)
    after = engine.admission.set_aside(second.key, 60)
    assert {ref.block_id for ref in before} == {ref.block_id for ref in after}
    assert not set(before) & set(after)


def test_start_before_the_last_block_is_an_error():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(70))
    engine.admission.admit(request)
    engine.admission.set_aside(request.key, 70)
    engine.admission.verify(request.key, 64)
    with pytest.raises(ValueError, match="before the last block"):
        engine.admission.start(request.key, ())
    with pytest.raises(ValueError, match="set_aside"):
        engine.admission.set_aside(request.key, 71)
    engine.check_integrity()


@pytest.mark.parametrize("brought", [0, 32, 64, 128, 150])
@pytest.mark.parametrize("settled", [False, True])
def test_a_fetch_that_failed_goes_on_with_local_prefill(brought, settled):
    pair = Pair()
    request = engine_request("a", toy_prompt(150), max_tokens=20)
    pair.begin(request)
    while pair.from_prefill[request.key].first is None:
        pair.from_prefill.take(pair.prefill.step())
    pair.fetch(request, brought)
    if brought < 150:
        pair.decode.admission.set_aside(request.key, 150)
    if settled:
        pair.decode.admission.fetch_settled(request.key)
    pair.decode.admission.compute_rest(request.key)
    pair.decode.check_integrity()
    records = run_to_end(pair.decode)
    check_answers(records, [request])
    computed = sum(tokens for _, tokens in pair.decode.runner.model.batch_sizes)
    assert computed == 150 - min(brought, 149) + 19
    pair.decode.admission.fetch_settled(request.key)
    assert pair.decode.ledger.num_available == pair.decode.num_blocks


@pytest.mark.parametrize("window", [None, 40])
def test_what_is_computed_behind_a_whole_fetch_is_written_into_blocks_without_a_name(window):
    """All of a prompt of whole units had come, and its source was lost before it told the first token."""
    pair = Pair({"window": window}, {"window": window})
    request, other = (
        engine_request("a", toy_prompt(128), max_tokens=20),
        engine_request("b", [*toy_prompt(128), 5], max_tokens=20),
    )
    pair.begin(request)
    while pair.from_prefill[request.key].first is None:
        pair.from_prefill.take(pair.prefill.step())
    pair.fetch(request, 128)
    named = set(pair.decode.ledger.find(other.span_hashes, 129))
    pair.decode.admission.fetch_settled(request.key)
    pair.decode.admission.submit(other)
    pair.decode.admission.compute_rest(request.key)
    pair.decode.check_integrity()
    written = set[int]()
    pair.decode.runner.model.before_forward = lambda batch: written.update((batch.slots // 16).tolist())
    records = run_to_end(pair.decode)
    assert not written & named
    for each in (request, other):
        assert records[each.key].answer() == toy_answer(each, window or 1 << 30)
    assert pair.decode.ledger.num_available == pair.decode.num_blocks


def test_prefill_refuses_beyond_two_chunks_waiting():
    engine = toy_engine(max_num_batched_tokens=100, num_blocks=128)
    engine.admission.accept(engine_request("long", toy_prompt(400)))  # nothing waits yet: any length may come
    with pytest.raises(Refusal, match="queue_full"):
        engine.admission.accept(engine_request("a", toy_prompt(90, 2)))
    engine.step()
    engine.admission.accept(engine_request("b", toy_prompt(90, 3)))
    engine.admission.accept(engine_request("c", toy_prompt(90, 4)))
    with pytest.raises(Refusal, match="queue_full"):
        engine.admission.accept(engine_request("d", toy_prompt(90, 5)))
    engine.cancel(Key("b"))
    engine.step()
    engine.admission.accept(engine_request("d", toy_prompt(90, 5)))
    engine.check_integrity()


def test_prefill_refuses_when_leases_hold_the_pool():
    engine = toy_engine(num_blocks=16, max_model_len=256)
    request = engine_request("a", toy_prompt(200))
    engine.admission.accept(request)
    run_until_done(engine, request)
    with pytest.raises(Refusal, match="kv_full"):
        engine.admission.accept(engine_request("b", toy_prompt(60, 2)))
    engine.admission.release_lease(request.key)
    assert engine.admission.accept(engine_request("b", toy_prompt(60, 2))).num_cached_tokens == 0
    engine.check_integrity()


def test_cancel_of_a_held_prefill_in_every_state():
    engine = toy_engine(max_num_batched_tokens=68)
    waiting, running, held = (engine_request(name, toy_prompt(120, seed)) for seed, name in enumerate(["w", "r", "h"]))
    engine.admission.accept(held)
    records = run_until_done(engine, held)
    engine.admission.accept(running)
    records.take(engine.step())
    engine.admission.accept(waiting)
    for request in (waiting, running, held):
        engine.cancel(request.key)
    records.take(engine.step())
    engine.check_integrity()
    assert all(records[request.key].ended.error == "cancelled" for request in (waiting, running, held))
    assert engine.ledger.num_available == engine.num_blocks and engine.load_report().num_waiting_tokens == 0


def test_a_lease_released_while_its_prefill_runs_ends_it():
    engine = toy_engine(max_num_batched_tokens=68)
    request = engine_request("a", toy_prompt(200))
    engine.admission.accept(request)
    records = Collector()
    records.take(engine.step())
    engine.admission.release_lease(request.key)
    records.take(engine.step())
    assert records[request.key].ended.error == "cancelled"
    assert engine.ledger.num_available == engine.num_blocks


def test_an_offer_leases_what_is_cached():
    engine = toy_engine(num_blocks=16, max_model_len=256)
    request = engine_request("a", toy_prompt(150), max_tokens=2)
    run_to_end(engine, [request])
    key = Key("offer")
    acceptance = engine.admission.offer(key, (*request.span_hashes, b"?" * 32))
    assert acceptance.num_cached_tokens == 128 and len(acceptance.blocks) == 8
    assert engine.load_report().blocks_by_holder["leased"] == 8
    with pytest.raises(ValueError, match="in use"):
        engine.admission.offer(key, request.span_hashes)
    assert engine.admission.offer(Key("other"), (b"?" * 32,)).blocks == ()
    engine.check_integrity()
    engine.admission.release_lease(key)
    assert engine.load_report().blocks_by_holder["leased"] == 0
    (ended,) = engine.step()
    assert ended.key == key and not ended.error


@pytest.mark.parametrize("seed", range(10))
def test_random_handoffs_cancels_and_local_work(seed):
    """Everything at once on small pools; integrity after each operation, one end per key and leg, right answers."""
    chance = random.Random(seed)
    block_size = chance.choice([16, 32, 64])
    options = dict(block_size=block_size, num_blocks=768 // block_size, max_num_batched_tokens=chance.choice([68, 128]))
    pair = Pair(options, options)
    pair.from_decode = Collector(first_index=1)
    answered, shared = [], toy_prompt(140, seed)
    for index in range(25):
        tokens = shared[: chance.choice([0, 64, 130])] + toy_prompt(chance.randint(1, 100), seed * 31 + index)
        n, max_tokens = chance.choice([1, 1, 2]), chance.randint(2, 60)
        request = engine_request(f"r{index}", tokens, max_tokens, n=n, temperature=1.0, seed=index)
        kind = chance.choice(["hand off", "hand off", "cancel prefill", "cancel fetch", "cancel decode"])
        try:
            if kind == "cancel prefill":
                pair.begin(request)
                pair.from_prefill.take(pair.prefill.step())
                pair.prefill.cancel(request.key)
                pair.decode.cancel(request.key)
            elif kind == "cancel fetch":
                pair.begin(request)
                pair.decode.admission.set_aside(request.key, chance.randint(1, len(tokens)))
                pair.decode.cancel(request.key)
                pair.check_integrity()
                pair.prefill.admission.release_lease(request.key)
                pair.decode.admission.fetch_settled(request.key)
            else:
                pair.hand_off(request)
                if kind == "cancel decode":
                    pair.from_decode.take(pair.decode.step())
                    pair.decode.cancel(request.key)
                else:
                    answered.append(request)
        except Refusal:
            pair.decode.cancel(request.key)
        for _ in range(chance.randint(0, 30)):
            pair.from_decode.take(pair.decode.step())
            pair.from_prefill.take(pair.prefill.step())
            pair.check_integrity()
    run_to_end(pair.decode, collector=pair.from_decode)
    run_to_end(pair.prefill, collector=pair.from_prefill)
    assert answered
    for request in answered:
        assert pair.answer(request) == toy_answer(request)
    for engine, records in ((pair.prefill, pair.from_prefill), (pair.decode, pair.from_decode)):
        assert all(record.ended is not None for record in records.values())
        assert not engine.admission.groups
        assert engine.ledger.num_available == engine.num_blocks and engine.ledger.num_reserved == 0
