"""Tenants share slots, blocks and steps evenly; one that is alone has everything; no answer depends on any of it."""

from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.request import Key, Refusal, Request
from baton.engine.schedule.states import GroupState
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine

FLOOD, QUIET = b"flood", b"quiet"


def of(tenant: bytes, name: str, num_tokens: int = 40, max_tokens: int = 8, **options) -> Request:
    prompt = [crc32(tenant + name.encode()) % 90 + i % 7 for i in range(num_tokens)]
    return engine_request(name, prompt, max_tokens, tenant_mark=tenant, **options)


def steps(engine, records: Collector, num: int) -> None:
    for _ in range(num):
        records.take(engine.step())
        engine.check_integrity()


def running(engine) -> dict[bytes, int]:
    tenants = [seq.group.tenant for seq in engine.scheduler.running]
    return {tenant: tenants.count(tenant) for tenant in tenants}


def check(records: Collector, requests) -> None:
    for request in requests:
        assert records[request.key].ended.error == ""
        assert records[request.key].answer() == toy_answer(request)


def test_who_comes_gets_a_place_where_another_has_taken_all():
    engine, records = toy_engine(max_num_seqs=4), Collector()
    flood = [of(FLOOD, f"f{i}", max_tokens=60, priority=10) for i in range(4)]
    for request in flood:
        engine.submit(request)
    steps(engine, records, 4)
    assert running(engine) == {FLOOD: 4}
    quiet = [of(QUIET, f"q{i}", max_tokens=30) for i in range(3)]
    for request in quiet[:1]:
        engine.submit(request)
    steps(engine, records, 1)
    assert records[quiet[0].key].first is not None and running(engine) == {FLOOD: 3, QUIET: 1}
    for request in quiet[1:]:
        engine.submit(request)
    steps(engine, records, 3)
    assert running(engine) == {FLOOD: 2, QUIET: 2}, "and no more than its part"
    run_to_end(engine, collector=records)
    check(records, flood + quiet)


def test_the_choices_of_one_request_leave_others_their_places():
    engine, records = toy_engine(max_num_seqs=8), Collector()
    flood = [of(FLOOD, f"f{i}", max_tokens=50, n=8, temperature=1.0, seed=i) for i in range(1)]
    for request in flood:
        engine.submit(request)
    steps(engine, records, 3)
    assert running(engine) == {FLOOD: 8}
    quiet = of(QUIET, "q")
    engine.submit(quiet)
    steps(engine, records, 1)
    assert records[quiet.key].first is not None
    run_to_end(engine, collector=records)
    check(records, [*flood, quiet])


def test_who_is_alone_has_everything():
    engine = toy_engine(max_num_seqs=4)
    requests = [of(FLOOD, f"f{i}", max_tokens=20) for i in range(5)]
    records = run_to_end(engine, requests)
    check(records, requests)
    assert not any(records[request.key].ended.report.num_preemptions for request in requests)
    assert max(size for size, _ in engine.runner.model.batch_sizes) == 4


def test_prompts_are_read_by_turns():
    """A prompt waits for one chunk of another tenant's, however many of those are there."""
    engine, records = toy_engine(max_num_seqs=8, num_blocks=128), Collector()
    flood = [of(FLOOD, f"f{i}", 400, priority=10) for i in range(3)]
    for request in flood:
        engine.submit(request)
    steps(engine, records, 2)
    quiet = of(QUIET, "q", 100)
    engine.submit(quiet)
    steps(engine, records, 1)
    assert records[quiet.key].first is not None
    run_to_end(engine, collector=records)
    check(records, [*flood, quiet])


def test_who_comes_waits_for_a_short_step_and_is_read_in_one_piece():
    """While tenants share, a step for one without saved turns reads a quarter of a whole chunk."""
    engine, records = toy_engine(max_num_seqs=8, num_blocks=128, max_num_batched_tokens=512), Collector()
    sizes = engine.runner.model.batch_sizes
    run_to_end(engine, [of(QUIET, "q0", 40)], records)
    for i in range(3):
        engine.submit(of(FLOOD, f"f{i}", 500, 1))
    steps(engine, records, 3)
    assert sizes[-1] == (1, 128)
    quiet = of(QUIET, "q1", 480)
    engine.submit(quiet)
    steps(engine, records, 1)
    assert records[quiet.key].first is not None and sizes[-1] == (1, 480)
    run_to_end(engine, collector=records)
    check(records, [quiet])


def test_gaps_between_a_floods_prompts_do_not_make_its_chunks_whole():
    """One that sends without end, and one at a time: its next prompt is read in short steps, and no token of it in
    those of one that seldom comes, whose rest would wait for them."""
    engine, records = toy_engine(num_blocks=128, max_model_len=1024, max_num_batched_tokens=512), Collector()
    sizes = engine.runner.model.batch_sizes
    run_to_end(engine, [of(QUIET, "q0", 40)], records)
    for i in range(4):
        run_to_end(engine, [of(FLOOD, f"f{i}", 500, 3)], records)
    engine.submit(of(FLOOD, "f4", 500, 1))
    steps(engine, records, 1)
    assert sizes[-1] == (1, 128)
    quiet = of(QUIET, "q1", 560)
    engine.submit(quiet)
    steps(engine, records, 2)
    assert records[quiet.key].first is not None and sizes[-2:] == [(1, 512), (1, 48)]
    run_to_end(engine, collector=records)
    check(records, [quiet])


def test_turns_are_by_tokens():
    """Two tenants that always have prompts to read are read the same number of tokens, whatever these are like."""
    engine, records = toy_engine(max_num_seqs=16, num_blocks=512), Collector()
    for i in range(2):
        engine.submit(of(QUIET, f"q{i}", 450, 1))
    for i in range(12):
        engine.submit(of(FLOOD, f"f{i}", 75, 1))
    steps(engine, records, 6)
    groups = engine.admission.groups.values()
    left = {
        tenant: sum(group.trunk.remaining for group in groups if group.tenant == tenant) for tenant in (FLOOD, QUIET)
    }
    assert min(left.values()) > 0 and abs(left[FLOOD] - left[QUIET]) <= 2 * 128, left


# ---- the door ----


def refusal(call) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def test_one_tenant_does_not_fill_the_door():
    engine = toy_engine(max_num_seqs=8)  # 10 choices are admitted
    for i in range(2):
        engine.admission.admit(of(FLOOD, f"f{i}", n=5))
    assert refusal(lambda: engine.admission.admit(of(FLOOD, "f2"))).reason == "queue_full"
    for i in range(5):
        engine.admission.admit(of(QUIET, f"q{i}"))
    assert refusal(lambda: engine.admission.admit(of(QUIET, "q5"))).reason == "queue_full"
    engine.admission.admit(of(b"third", "t", n=8))  # its first, however large
    assert refusal(lambda: engine.admission.admit(of(b"third", "t2"))).reason == "queue_full"


def test_one_tenants_prompts_do_not_fill_the_line_before_a_prefill():
    engine = toy_engine()  # 2 x 128 tokens may wait
    for i in range(2):
        engine.admission.accept(of(FLOOD, f"f{i}", 128))
    assert refusal(lambda: engine.admission.accept(of(FLOOD, "f2", 64))).reason == "queue_full"
    engine.admission.accept(of(QUIET, "q", 300))
    assert refusal(lambda: engine.admission.accept(of(QUIET, "q2", 64))).reason == "queue_full"


def test_without_marks_there_is_one_tenant():
    engine = toy_engine(num_blocks=32)
    engine.admission.admit(engine_request("a", [1] * 470, 8))
    engine.admission.admit(engine_request("b", [2] * 10, 8))
    assert engine.ledger.num_available == 0, "nothing is kept for others"


# ---- blocks ----


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("num_tokens", [150, 235])  # 15 blocks are those of more than one that is preempted
def test_who_lacks_blocks_gets_those_that_another_has_beyond_its_part(named, num_tokens):
    """What is preempted for it finds its own in the cache, and leaves them until they are taken."""
    engine, records = toy_engine(max_num_seqs=8, num_blocks=32, max_model_len=256), Collector()
    flood = [of(FLOOD, f"f{i}", 60, 160, named=named) for i in range(3)]
    for request in flood:
        engine.submit(request)
    while engine.ledger.num_available > 2:
        steps(engine, records, 1)
    quiet = of(QUIET, "q", num_tokens, 8)
    assert refusal(lambda: engine.admission.admit(quiet)).retry_after_s < 0.1
    assert refusal(lambda: engine.admission.admit(of(FLOOD, "f9", 20))).reason == "kv_full", "they are owed to another"
    steps(engine, records, 1)
    engine.submit(quiet)
    assert not engine.admission.shares.is_short, "it has what it lacked"
    while records[quiet.key].ended is None:
        steps(engine, records, 1)
    assert not records[quiet.key].ended.report.num_preemptions
    run_to_end(engine, collector=records)
    check(records, [*flood, quiet])


@pytest.mark.parametrize("is_for_taker", [False, True])
@pytest.mark.parametrize("is_cached", [False, True])
def test_who_lacks_a_state_gets_one_that_another_has_beyond_its_part(is_cached, is_for_taker):
    """There are blocks enough. One that goes on from a checkpoint needs two at first."""
    engine, records = toy_engine(num_states=4 + is_cached, max_num_seqs=8), Collector()
    quiet = of(QUIET, "q", 100)
    if is_cached:
        run_to_end(engine, [replace(quiet, key=Key("q0"))], records)
    flood = [of(FLOOD, f"f{i}", max_tokens=60) for i in range(4)]
    for request in flood:
        engine.submit(request)
    steps(engine, records, 4)
    assert running(engine) == {FLOOD: 4} and bool(engine.ledger.find(quiet.span_hashes, 100)) == is_cached
    take = engine.admission.accept if is_for_taker else engine.submit
    assert refusal(lambda: take(quiet)).retry_after_s < 0.1
    steps(engine, records, 1)
    assert refusal(lambda: engine.submit(of(FLOOD, "f9"))).reason == "kv_full", "it is owed to another"
    take(quiet)
    assert not engine.admission.shares.is_short, "it has what it lacked"
    steps(engine, records, 2)
    assert records[quiet.key].first is not None
    engine.admission.release_lease(quiet.key)
    run_to_end(engine, collector=records)
    check(records, flood if is_for_taker else [*flood, quiet])


def test_who_comes_back_gets_a_state_where_another_has_taken_all():
    engine, records = toy_engine(num_states=4, max_num_seqs=8), Collector()
    quiet, flood = of(QUIET, "q", max_tokens=60), [of(FLOOD, f"f{i}", max_tokens=60) for i in range(4)]
    engine.submit(quiet)
    steps(engine, records, 2)
    engine.admission.park(quiet.key)
    steps(engine, records, 1)
    for request in flood:
        engine.submit(request)
    steps(engine, records, 4)
    assert running(engine) == {FLOOD: 4}
    engine.admission.resume(quiet.key)
    steps(engine, records, 2)
    assert running(engine) == {FLOOD: 3, QUIET: 1}
    run_to_end(engine, collector=records)
    check(records, [*flood, quiet])


def test_what_is_owed_counts_the_cached_prefix():
    """It is taken with the rest, or nobody is preempted while no more than that is left."""
    engine, records = toy_engine(max_num_seqs=8, num_blocks=32), Collector()
    run_to_end(engine, [before := of(QUIET, "q", 130, 2)], records)
    flood = [of(FLOOD, f"f{i}", 60, 160) for i in range(3)]
    for request in flood:
        engine.submit(request)
    while engine.ledger.num_available > 8:
        steps(engine, records, 1)
    quiet = engine_request("q1", [*before.token_ids, *range(20)], 4, tenant_mark=QUIET)
    assert len(engine.ledger.find(quiet.span_hashes, 150)) == engine.ledger.num_available == 8
    assert refusal(lambda: engine.submit(quiet)).retry_after_s < 0.1
    steps(engine, records, 1)
    engine.submit(quiet)
    run_to_end(engine, collector=records)
    check(records, [*flood, quiet])


def test_what_waits_while_others_are_owed_blocks_holds_none():
    """It has found its own in the cache, no more than its tenant's part. Nothing runs that would give back any."""
    engine, records = toy_engine(max_num_seqs=8, num_blocks=32), Collector()
    first, flood = of(QUIET, "q0", 100, 150), of(FLOOD, "f", 160, 180, priority=10)
    for request in (first, flood):
        engine.submit(request)
    while records[first.key].ended is None:
        steps(engine, records, 1)
    assert not engine.scheduler.running and engine.admission.groups[flood.key].trunk.blocks.ids
    quiet = of(QUIET, "q1", 430, 8)
    assert refusal(lambda: engine.admission.admit(quiet)).retry_after_s < 0.1
    steps(engine, records, 1)
    engine.submit(quiet)
    run_to_end(engine, collector=records)
    check(records, [first, flood, quiet])


def test_tenants_that_are_all_parked_have_no_part_of_the_blocks():
    """They hold none: what there is has two sharers."""
    engine, records = toy_engine(max_num_seqs=8, num_blocks=32, max_model_len=256), Collector()
    for request in [of(tenant, tenant.decode(), max_tokens=60) for tenant in (b"third", b"fourth")]:
        engine.submit(request)
        steps(engine, records, 2)
        engine.admission.park(request.key)
        steps(engine, records, 1)
    engine.admission.admit(of(QUIET, "q0", 80, 16))
    engine.admission.admit(of(FLOOD, "f0", 240, 16))
    engine.admission.admit(of(QUIET, "q1", 140, 16))
    assert engine.ledger.num_available == 0, "what was kept for newcomers is its part"


def test_promises_leave_a_few_blocks_for_newcomers():
    """A request that is admitted but has no blocks yet cannot be preempted."""
    engine = toy_engine(max_num_seqs=16, num_blocks=64, max_model_len=256)
    for i in range(20):
        try:
            engine.admission.admit(of(FLOOD, f"f{i}", 100, 60))
        except Refusal as refused:
            assert refused.reason == "kv_full"
    assert engine.ledger.num_available >= 8
    engine.admission.admit(of(QUIET, "q", 40, 8))


def test_nobody_is_preempted_for_a_tenant_that_holds_more():
    engine, records = toy_engine(max_num_seqs=8, num_blocks=32, max_model_len=400), Collector()
    flood = [of(FLOOD, f"f{i}", 40, 200, named=False, priority=10) for i in range(3)]
    quiet = of(QUIET, "q", 40, 60, named=False)
    for request in (*flood, quiet):
        engine.submit(request)
    run_to_end(engine, collector=records)
    check(records, [*flood, quiet])
    assert not records[quiet.key].ended.report.num_preemptions
    assert any(records[request.key].ended.report.num_preemptions for request in flood)


def flood_door(engine, tenant: bytes, requests: list, num_tokens: int) -> None:
    """Submit requests until one is refused."""
    while True:
        request = of(tenant, f"{tenant.decode()}{len(requests)}", num_tokens, 6 + len(requests) % 5)
        try:
            engine.submit(request)
        except Refusal:
            return
        requests.append(request)


@pytest.mark.parametrize(("num_tokens", "is_part"), [(200, True), (360, False)])
def test_what_waits_for_blocks_is_not_passed_for_good_by_its_tenants_requests(num_tokens, is_part):
    """As long as it is no more than its tenant's part, 24 blocks. One that is has to wait for other tenants, and those
    of its own go on meanwhile."""
    engine, records = toy_engine(max_num_seqs=16, num_blocks=48), Collector()
    long = of(QUIET, "long", num_tokens, 60)
    engine.submit(long)
    steps(engine, records, 4)
    engine.admission.park(long.key)
    own, flood = [], []
    for step in range(200):
        flood_door(engine, QUIET, own, 30)
        flood_door(engine, FLOOD, flood, 60)
        steps(engine, records, 1)
        if step == 10:
            engine.admission.resume(long.key)
        if is_part and records[long.key].ended:
            break
    assert (records[long.key].ended is not None) == is_part
    assert is_part or sum(records[request.key].ended is not None for request in own) > 100
    run_to_end(engine, collector=records)
    check(records, [long, *own, *flood])


def test_who_comes_behind_one_that_waits_is_owed_what_both_lack():
    """It leaves that one what it lacks: with what it lacks alone both wait. Their tenant runs its part, and has not its
    part of the blocks."""
    engine, records = toy_engine(num_blocks=80, max_num_seqs=12), Collector()
    long = of(QUIET, "long", 240, 60, named=False)
    flood = [of(FLOOD, f"f{i}", 150, 40, named=False) for i in range(5)]
    own = [of(QUIET, f"q{i}", 4, 28, named=False) for i in range(6)]
    engine.submit(long)
    steps(engine, records, 4)
    engine.admission.park(long.key)
    for requests, num in (((), 1), (flood, 8), (own, 2)):
        for request in requests:
            engine.submit(request)
        steps(engine, records, num)
    engine.admission.resume(long.key)
    steps(engine, records, 2)
    new = of(QUIET, "new", 100, 4, named=False)
    assert running(engine) == {FLOOD: 5, QUIET: 6} and engine.ledger.num_available == 8
    assert refusal(lambda: engine.submit(new)).retry_after_s < 0.1
    owed = [engine.scheduler.shares.owed()[QUIET].blocks]
    steps(engine, records, 1)
    assert long.key in [seq.group.key for seq in engine.scheduler.running]
    owed.append(engine.scheduler.shares.owed()[QUIET].blocks)
    assert 0 < owed[1] < owed[0], "else others are preempted for what the one that waited has"
    engine.submit(new)
    run_to_end(engine, collector=records)
    check(records, [long, new, *own, *flood])


def test_what_waits_for_blocks_is_passed_by_a_request_of_higher_priority():
    engine, records = toy_engine(num_blocks=32), Collector()
    long, held = of(QUIET, "long", 300, 60, named=False), of(QUIET, "held", 240)
    engine.submit(long)
    steps(engine, records, 4)
    engine.admission.park(long.key)
    steps(engine, records, 1)
    engine.admission.accept(held)
    engine.admission.resume(long.key)
    steps(engine, records, 3)
    assert engine.scheduler.waiting and engine.ledger.num_available >= 2
    assert refusal(lambda: engine.submit(of(QUIET, "q0", 20))).reason == "kv_full"
    first = of(QUIET, "q1", 20, priority=1)
    engine.submit(first)
    steps(engine, records, 12)
    check(records, [first])
    assert records[long.key].ended is None
    engine.admission.release_lease(held.key)
    run_to_end(engine, collector=records)
    check(records, [long])


def test_what_parks_unread_holds_nothing():
    engine, records = toy_engine(max_num_seqs=4), Collector()
    flood = [of(FLOOD, f"f{i}", max_tokens=60) for i in range(4)]
    for request in flood:
        engine.submit(request)
    steps(engine, records, 4)
    for request in flood:
        engine.admission.park(request.key)
    steps(engine, records, 1)
    assert not engine.scheduler.running and not engine.scheduler._tenants and engine.ledger.num_reserved == 0
    assert all(group.state is GroupState.PARKED for group in engine.admission.groups.values())
    engine.admission.admit(of(FLOOD, "f4", n=4))
    engine.cancel(of(FLOOD, "f4").key)
    for request in flood:
        engine.admission.resume(request.key)
    run_to_end(engine, collector=records)
    check(records, flood)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([b"", b"a", b"b", b"c"]), st.integers(1, 200), st.integers(1, 40), st.integers(1, 3),
        st.integers(-3, 3), st.integers(0, 6),
    ),
    min_size=2, max_size=12,
)  # fmt: skip


@settings(max_examples=12)
@given(REQUESTS, st.integers(20, 60), st.integers(3, 8), st.sampled_from([None, 3, 6]))
def test_no_answer_hangs_on_who_else_is_there(drawn, num_blocks, max_num_seqs, num_states):
    sizes = dict(max_num_seqs=max_num_seqs, num_blocks=num_blocks, num_states=num_states)
    engine, records = toy_engine(max_model_len=256, **sizes), Collector()
    requests = []
    for i, (tenant, num_tokens, max_tokens, n, priority, pause) in enumerate(drawn):
        request = of(tenant, f"r{i}", num_tokens, max_tokens, n=n, priority=priority, temperature=1.0, seed=i)
        for _ in range(2000):
            try:
                engine.submit(request)
                break
            except Refusal as refused:
                assert refused.reason in ("queue_full", "kv_full")
                steps(engine, records, 1)
        requests.append(request)
        steps(engine, records, pause)
    run_to_end(engine, collector=records)
    check(records, requests)
    assert not engine.scheduler._tenants and engine.ledger.num_reserved == 0
