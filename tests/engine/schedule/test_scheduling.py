"""Batching, chunks, prefix hits, choices, endings: on the toy model, against the pure answer."""

import time
from types import SimpleNamespace

import pytest

from baton.engine.core.request import FinishReason, Key, Refusal, Waits
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import hand_over
from tests.support.engine.serving import check_answers
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine, toy_prompt


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("chunk", [68, 100, 128, 400])
def test_mixed_lengths_answer_as_if_alone(block_size, chunk):
    engine = toy_engine(block_size=block_size, num_blocks=4096 // block_size, max_num_batched_tokens=chunk)
    lengths = (1, 63, 64, 65, 130, 200, 300)
    requests = [engine_request(f"r{n}", toy_prompt(n), max_tokens=3 + n % 5) for n in lengths[:5]]
    check_answers(run_to_end(engine, requests), requests)
    requests = [engine_request(f"s{n}", toy_prompt(n), max_tokens=70, temperature=1.0, seed=n) for n in lengths[3:]]
    check_answers(run_to_end(engine, requests), requests)
    assert engine.load_report().blocks_by_holder["running"] == 0
    assert engine.ledger.num_reserved == 0


def test_decoding_goes_on_while_prompts_are_read():
    engine = toy_engine(max_num_batched_tokens=68)
    first = engine_request("a", toy_prompt(20), max_tokens=30)
    engine.submit(first)
    records = Collector()
    records.take(engine.step())
    second = engine_request("b", toy_prompt(300, 2), max_tokens=2)
    engine.submit(second)
    sizes = engine.runner.model.batch_sizes
    records = run_to_end(engine, collector=records)
    check_answers(records, [first, second])
    assert (2, 65) in sizes  # one decoding token beside a chunk of one span
    assert records[second.key].first.num_chunks == 5
    assert all(tokens <= 68 for _, tokens in sizes)


def test_the_wait_for_a_place_in_the_batch_is_told():
    engine = toy_engine(max_num_seqs=1)
    requests = [engine_request(f"r{n}", toy_prompt(20, n), max_tokens=5) for n in range(3)]
    records = run_to_end(engine, requests)
    first, *others = (records[request.key].first for request in requests)
    assert first.waits == Waits()
    for each in others:
        assert 0 < each.waits.slot_s <= each.queue_s and each.waits.block_s == 0
    assert all(records[request.key].ended.report.waits == Waits() for request in requests)


def test_chunks_end_on_spans_except_the_last():
    engine = toy_engine(max_num_batched_tokens=100)
    acceptance = engine.admission.accept(request := engine_request("a", toy_prompt(250)))
    assert len(acceptance.blocks) == 16 and acceptance.num_cached_tokens == 0
    records = Collector()
    while records[request.key].first is None:
        records.take(engine.step())
        engine.check_integrity()
    assert records[request.key].progress == [64, 128, 192, 250]


def test_a_prefix_is_computed_once():
    engine = toy_engine()
    first = engine_request("a", toy_prompt(200))
    check_answers(run_to_end(engine, [first]), [first])
    engine.runner.model.batch_sizes.clear()
    second = engine_request("b", toy_prompt(200)[:150] + toy_prompt(30, 5))
    records = run_to_end(engine, [second])
    check_answers(records, [second])
    assert records[second.key].first.num_cached_tokens == 128
    assert engine.runner.model.batch_sizes[0] == (1, 180 - 128)


def test_the_next_turn_finds_the_output_too():
    engine = toy_engine()
    first = engine_request("a", toy_prompt(100), max_tokens=60)
    answer = run_to_end(engine, [first])[first.key].answer()[0][0]
    second = engine_request("b", [*first.token_ids, *answer, 5, 6, 7])
    records = run_to_end(engine, [second])
    assert records[second.key].first.num_cached_tokens == 128
    check_answers(records, [second])
    assert set(first.span_hashes) < set(engine.ledger.snapshot())


def test_a_request_without_names_stays_out_of_the_cache():
    engine = toy_engine()
    for name in ("a", "b"):
        request = engine_request(name, toy_prompt(200), named=False, max_tokens=80)
        records = run_to_end(engine, [request])
        check_answers(records, [request])
        assert records[request.key].first.num_cached_tokens == 0
    assert engine.ledger.snapshot() == [] and engine.ledger.block_events() == ([], [])


def test_a_prompt_that_came_into_the_cache_while_waiting_is_not_read_again():
    engine = toy_engine(max_num_seqs=1, max_num_batched_tokens=256)
    requests = [engine_request(name, toy_prompt(200)) for name in "ab"]
    records = run_to_end(engine, requests)
    check_answers(records, requests)
    assert records[requests[1].key].first.num_cached_tokens == 192
    assert [tokens for _, tokens in engine.runner.model.batch_sizes if tokens > 1] == [200, 200 - 192]


@pytest.mark.parametrize("num_tokens", [5, 63, 64, 65, 96, 100])
def test_choices_share_the_prompt(num_tokens):
    engine = toy_engine(max_num_seqs=8)
    request = engine_request("a", toy_prompt(num_tokens), max_tokens=80, n=3, temperature=1.5, seed=4)
    engine.submit(request)
    records = Collector()
    records.take(engine.step())
    engine.check_integrity()
    own = -(-num_tokens // 16) - num_tokens // 16
    assert engine.load_report().blocks_by_holder["running"] == num_tokens // 16 + 3 * own
    records = run_to_end(engine, collector=records)
    check_answers(records, [request])
    assert len({tuple(tokens) for tokens in records[request.key].tokens.values()}) == 3


def test_more_choices_than_sequences():
    engine = toy_engine(max_num_seqs=2)
    request = engine_request("a", toy_prompt(50), max_tokens=20, n=5, temperature=1.0, seed=9)
    check_answers(run_to_end(engine, [request]), [request])


def test_no_more_decode_than_may():
    """Of choices, and of prompts that were fetched: both could begin at once."""
    engine, source = toy_engine(max_num_seqs=2), toy_engine()
    requests = [engine_request(f"r{n}", toy_prompt(70, n), 20) for n in range(3)]
    hand_over(
        source, engine, [*requests, engine_request("choices", toy_prompt(70, 9), 20, n=3, temperature=1.0, seed=1)]
    )
    assert max(size for size, _ in engine.runner.model.batch_sizes) == 2


def test_stop_tokens_and_min_tokens():
    engine = toy_engine()
    plain = engine_request("plain", toy_prompt(40), max_tokens=12)
    tokens = toy_answer(plain)[0][0]
    stop = frozenset(tokens[3:4])
    stopped = engine_request("stop", toy_prompt(40), max_tokens=12, stop_token_ids=stop)
    later = engine_request("min", toy_prompt(40), max_tokens=12, stop_token_ids=stop, min_tokens=8)
    first = engine_request("first", toy_prompt(40), max_tokens=12, stop_token_ids=frozenset(tokens[:1]))
    one = engine_request("one", toy_prompt(40), max_tokens=1)
    requests = [plain, stopped, later, first, one]
    engine = toy_engine(max_num_seqs=8)
    records = run_to_end(engine, requests)
    check_answers(records, requests)
    assert records[stopped.key].answer()[0] == (tokens[: tokens.index(tokens[3]) + 1], FinishReason.STOP)
    assert len(records[later.key].tokens[0]) >= 9
    assert records[first.key].first.first_tokens[0].finish_reason is FinishReason.STOP
    assert records[one.key].first.first_tokens[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_choices", [1, 3])
def test_an_engine_takes_what_it_can_end_and_nothing_longer(num_choices):
    """Its own length ends no choice: five tokens fit behind these 75, and six are refused at the door."""
    engine = toy_engine(max_model_len=80, num_blocks=5 + 2 * (num_choices > 1))
    request = engine_request("a", toy_prompt(75), max_tokens=5, n=num_choices)
    records = run_to_end(engine, [request])
    check_answers(records, [request])
    assert [len(tokens) for tokens in records[request.key].tokens.values()] == [5] * num_choices
    for one_more in (
        engine_request("b", toy_prompt(75), max_tokens=6),
        engine_request("b", toy_prompt(80), max_tokens=1),
    ):
        for verb in (engine.admission.admit, engine.submit):
            with pytest.raises(Refusal, match="too_long"):
                verb(one_more)
    if num_choices == 1:  # each choice needs a block of its own behind the prompt's whole ones
        with pytest.raises(Refusal, match="too_long"):
            engine.admission.admit(engine_request("b", toy_prompt(75), max_tokens=5, n=2))
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks


def test_a_held_prefill_takes_any_prompt_that_it_can_read():
    """Its length and choices behind the first token concern its taker alone."""
    engine = toy_engine(max_model_len=80, num_blocks=5)
    request = engine_request("a", toy_prompt(79), max_tokens=400, n=3)
    engine.admission.accept(request)
    (done,) = [record.first for record in run_to_end(engine).values() if record.first]
    assert [first.finish_reason for first in done.first_tokens] == [None] * 3
    engine.admission.release_lease(request.key)
    with pytest.raises(Refusal, match="too_long"):
        engine.admission.accept(engine_request("b", toy_prompt(80), max_tokens=1))


def test_a_migrated_request_goes_on_from_its_next_index():
    engine = toy_engine()
    whole = engine_request("whole", toy_prompt(70), max_tokens=40, temperature=1.0, seed=3)
    tokens, reason = toy_answer(whole)[0]
    moved = engine_request("moved", [*whole.token_ids, *tokens[:25]], 40, num_prompt_tokens=70, temperature=1.0, seed=3)
    engine.submit(moved)
    records = run_to_end(engine, collector=Collector(first_index=25))
    assert records[moved.key].answer() == {0: (tokens[25:], reason)}


def test_priority_goes_first_and_arrival_after_that():
    requests = [engine_request(name, toy_prompt(10, seed), priority=name == "c") for seed, name in enumerate("abc")]
    engine = toy_engine(max_num_seqs=1, num_blocks=64)
    order = []
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        order += [output.key.request_id for output in engine.step() if hasattr(output, "first_tokens")]
    assert order == ["c", "a", "b"]


def test_too_many_choices_are_refused_at_the_door():
    engine = toy_engine(max_num_seqs=4)
    for index in range(6):
        engine.admission.admit(engine_request(f"r{index}", toy_prompt(10)))
    with pytest.raises(Refusal) as refusal:
        engine.admission.admit(engine_request("more", toy_prompt(10)))
    assert refusal.value.reason == "queue_full" and refusal.value.retry_after_s > 0
    engine.cancel(Key("r0"))
    engine.admission.admit(engine_request("more", toy_prompt(10)))
    engine.check_integrity()


def test_a_key_in_use_is_an_error():
    engine = toy_engine()
    request = engine_request("a", toy_prompt(10))
    engine.submit(request)
    for verb in (engine.admission.admit, engine.admission.accept, engine.submit):
        with pytest.raises(ValueError, match="in use"):
            verb(request)


def test_a_deadline_ends_a_request_in_every_state():
    engine = toy_engine(max_num_seqs=1)
    soon = time.monotonic() + 0.05
    running = engine_request("running", toy_prompt(10), max_tokens=400, deadline=soon)
    admitted = engine_request("admitted", toy_prompt(100), deadline=soon)
    engine.submit(running)
    engine.admission.admit(admitted)
    engine.admission.set_aside(admitted.key, 64)
    records = Collector()
    while records[running.key].ended is None or records[admitted.key].ended is None:
        records.take(engine.step())
        engine.check_integrity()
    assert {record.ended.error for record in records.values()} == {"deadline"}
    assert engine.load_report().blocks_by_holder["quarantined"] == 4
    engine.admission.fetch_settled(admitted.key)
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks


def test_cancel_in_the_middle_of_a_step():
    """The blocks of a step in flight are its own until it has passed."""
    engine = toy_engine(num_blocks=20, max_model_len=256)
    request = engine_request("a", toy_prompt(50), max_tokens=14)
    engine.submit(request)
    records = Collector()
    records.take(engine.step())
    held = engine.load_report().blocks_by_holder["running"]
    other = engine_request("b", toy_prompt(200, 2))
    engine.admission.admit(other)

    def cancel(batch):
        engine.cancel(request.key)
        engine.cancel(request.key)
        assert engine.load_report().blocks_by_holder["running"] == held
        refs = engine.admission.set_aside(other.key, 200)  # all that is left
        written = {block_id for piece in batch.seqs for block_id in piece.block_ids.tolist()}
        assert len(written) == held and not written & {ref.block_id for ref in refs}

    engine.runner.model.before_forward = cancel
    records.take(engine.step())
    assert len(records[request.key].tokens[0]) == 2 and records[request.key].ended is None
    records.take(engine.step())
    assert records[request.key].ended.error == "cancelled"
    assert engine.load_report().blocks_by_holder["running"] == 0
    engine.cancel(request.key)
    assert not engine.has_work()


def test_cancel_before_the_first_step():
    engine = toy_engine()
    requests = [engine_request("a", toy_prompt(50)), engine_request("b", toy_prompt(60))]
    engine.submit(requests[0])
    engine.cancel(requests[0].key)
    engine.submit(requests[1])
    records = run_to_end(engine)
    assert records[requests[0].key].ended.error == "cancelled" and not records[requests[0].key].tokens
    check_answers(records, requests[1:])
    assert engine.load_report().num_waiting_tokens == 0


def test_load_and_reports():
    engine = toy_engine(max_num_seqs=2)
    requests = [engine_request(f"r{index}", toy_prompt(40, index), max_tokens=6) for index in range(2)]
    for request in requests:
        engine.submit(request)
    assert engine.load_report().num_waiting_tokens == 80
    records = Collector()
    records.take(engine.step())
    load = engine.load_report()
    assert (load.step, load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 2, 0, 0)
    assert load.tokens_per_s == 2 and load.num_blocks_total == 64
    run_to_end(engine, collector=records)
    for request in requests:
        report, first = records[request.key].ended.report, records[request.key].first
        assert report.num_steps == 5 and report.num_preemptions == 0
        assert report.decode_s >= report.first_step_s > 0 and report.decode_queue_s >= 0
        assert first.prefill_s > 0 and first.queue_s >= 0


def test_who_was_owed_blocks_may_be_gone(monkeypatch):
    """No tenant is left in the loop, and the blocks owed to the last have expired: nothing to divide by."""
    engine = toy_engine(num_blocks=16, max_model_len=256)
    engine.admission.accept(engine_request("a", toy_prompt(200), tenant_mark=b"a"))
    while not engine.step():
        pass
    engine.step()
    with pytest.raises(Refusal, match="kv_full"):
        engine.admission.admit(engine_request("b", toy_prompt(120, 2), tenant_mark=b"b"))
    now = time.monotonic()
    monkeypatch.setattr("baton.engine.schedule.tenant_shares.time", SimpleNamespace(monotonic=lambda: now + 60))
    assert engine.admission.shares.is_short
    engine.step()
    engine.check_integrity()


def test_turns_that_cannot_be_used_go_to_others():
    """Tenant a has turns to spare and lacks blocks, which a prompt of tenant b has that waits for its turn."""
    engine = toy_engine(num_blocks=16, max_model_len=256)
    first = engine_request("a", toy_prompt(100), 20, tenant_mark=b"a")
    engine.submit(first)
    records = Collector()
    records.take(engine.step())
    (seq,) = engine.scheduler.running
    engine.scheduler.preempt(seq)
    engine.admission.accept(second := engine_request("b", toy_prompt(200, 2), tenant_mark=b"b"))
    engine.scheduler._turns.wait([b"a", b"b"])
    engine.scheduler._turns.charge(b"b", 10**6)
    for _ in range(10):
        records.take(engine.step())
    assert records[second.key].first, "a prompt that has all its blocks is not read"
    engine.admission.release_lease(second.key)
    check_answers(run_to_end(engine, collector=records), [first])
