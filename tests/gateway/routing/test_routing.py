import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.request import Refusal
from baton.service.slo import Slo
from gateway.config.settings import SPLITS
from gateway.routing import routing
from gateway.routing.latency_model import Pace
from gateway.routing.routing import (
    NUM_DRAWN,
    NUM_HOLDERS,
    Candidate,
    Decision,
    NoRoute,
    RoutingRequest,
    WorkerLimits,
    can_decode,
    can_prefill,
    choose,
    choose_holder,
    choose_prefill_for_taker,
    compatible,
    shortlist,
)
from tests.support.engine.toy_engine import engine_request, toy_engine

WORDS = frozenset(["class", "form bf16"])
BASE = Candidate("", 0, 0, 0, WorkerLimits(4096), WORDS, WORDS, frozenset(["tcp"]), "host", kv_layout=b"blocks of 32")


def worker(name: str, matched: int = 0, sequences: int = 0, waiting: int = 0, **fields) -> Candidate:
    return BASE._replace(
        name=name, num_matched_tokens=matched, num_sequences=sequences, num_waiting_tokens=waiting, **fields
    )


def route(num_tokens: int, prefill, decode, split: str = "auto", max_len: int = 100, slo: Slo = Slo()) -> Decision:
    return choose(RoutingRequest(num_tokens, max_len, slo=slo), prefill, decode, split)


def test_a_long_prompt_is_split_where_others_would_wait():
    assert route(1000, [worker("p")], [worker("d", sequences=2)]) == Decision("p", "d", "long_prompt")


def test_workers_where_the_adapter_is_ready():
    """Before idle ones, on both sides; but not before a long wait."""
    without = [worker(name, lacks_adapter=True) for name in "ab"]
    assert route(50, [], [*without, worker("c", sequences=1)]).decode == "c"
    assert route(50, [], [*without, worker("c", sequences=100)]).decode == "a"
    pair = route(1000, [*without, worker("p", waiting=100)], [*without, worker("d", sequences=1)], "always")
    assert (pair.prefill, pair.decode) == ("p", "d")
    far = route(1000, [*without, worker("p", waiting=9000)], [worker("d", sequences=1)], "always")
    assert far.prefill == "a"


@pytest.mark.parametrize(
    "num_tokens, decode, reason",
    [
        (64, worker("d", sequences=9), "short_prompt"),
        (1000, worker("d", matched=960, sequences=1), "hot_cache"),
        (1000, worker("d"), "idle"),
    ],
)
def test_what_stays_on_the_decode_worker(num_tokens, decode, reason):
    assert route(num_tokens, [worker("p")], [decode]) == Decision(None, "d", reason)
    assert route(num_tokens, [worker("p")], [decode], "always") == Decision("p", "d", "forced")
    assert route(num_tokens, [worker("p")], [decode], "never") == Decision(None, "d", "forced")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("prefill_token_s", [1 / 70, 1 / 5_000])
def test_an_idle_decode_worker_that_holds_more_reads_the_rest(share, prefill_token_s):
    """748 tokens, of which it held 704 and the prefill worker 576, went to the latter: it was to pull the rest from the
    former, which had been the busier of the two."""
    pace = Pace(prefill_token_s=prefill_token_s, prefill_base_s=0.0)
    fields = {"pace": pace, "kv_token_bytes": 3_000}
    prefill, decode = worker("p", matched=576, **fields), worker("d", matched=704, utilization=share, **fields)
    assert route(748, [prefill], [decode]) == Decision(None, "d", "hot_cache")
    assert route(748, [prefill], [decode._replace(num_sequences=8)]).prefill == "p", "others would wait for it"
    assert (
        route(748, [prefill._replace(num_matched_tokens=744)], [decode._replace(num_matched_tokens=64)]).prefill == "p"
    )


def test_a_prefill_worker_with_a_queue_is_passed_by():
    assert route(1000, [worker("p", waiting=9000)], [worker("d", sequences=2)]) == Decision(None, "d", "prefill_busy")
    assert route(1000, [worker("p", matched=960)], [worker("d", matched=500, sequences=2)]).prefill == "p"


def test_the_prefill_worker_with_the_prefix():
    busy = [worker("d", sequences=4)]
    assert route(1000, [worker("a"), worker("b", matched=640)], busy).prefill == "b"
    assert route(1000, [worker("a"), worker("b", matched=640, waiting=2000)], busy).prefill == "a"


def test_the_decode_worker_with_room():
    assert route(1000, [worker("p")], [worker("a", sequences=3), worker("b")]).decode == "b"
    full = worker("a", max_sequences=2, sequences=2, pace=Pace(decode_sequence_s=0.0))
    assert route(1000, [worker("p")], [full, worker("b", sequences=40)]).decode == "b"
    assert route(1000, [worker("p")], [worker("a", num_free_tokens=900), worker("b", sequences=40)]).decode == "b"


def test_the_faster_worker():
    slow, fast = Pace(prefill_token_s=1e-3, decode_base_s=0.05), Pace(prefill_token_s=1e-4, decode_base_s=0.01)
    chosen = route(
        1000,
        [worker("a", pace=slow), worker("b", pace=fast)],
        [worker("c", sequences=1, pace=slow), worker("d", sequences=1, pace=fast)],
        "always",
    )
    assert (chosen.prefill, chosen.decode) == ("b", "d")


def test_the_decode_worker_that_has_most_of_it_where_moving_is_slow():
    """1,000 tokens of 1 MB at 1 GB/s are a second, of which 0.2 s are hidden behind the prompt."""
    taking = [worker("a", kv_token_bytes=10**6), worker("b", matched=960, sequences=1, kv_token_bytes=10**6)]
    assert route(1000, [worker("p", host_id="there")], taking, "always").decode == "b"
    assert (
        route(
            1000, [worker("p", host_id="there")], [each._replace(kv_token_bytes=10) for each in taking], "always"
        ).decode
        == "a"
    )


def test_a_promise_is_kept_where_it_can_be():
    """A tenth more a sequence: the eleventh breaks 40 ms a token, whether it is this request's promise or another's."""
    pace, tight = Pace(decode_base_s=0.02, decode_sequence_s=0.002), Slo(tpot_s=0.04)
    few, many = (
        worker("few", sequences=9, utilization=0.0, pace=pace),
        worker("many", sequences=10, pace=pace._replace(decode_base_s=0.0195)),
    )
    assert route(1000, [worker("p")], [few, many], "always", slo=tight).decode == "few"
    assert route(1000, [worker("p")], [few, many._replace(tightest_tpot_s=0.04)], "always").decode == "few"


def test_a_first_token_that_would_be_late_goes_elsewhere():
    prefill = [worker("near", matched=960, waiting=1500), worker("far", waiting=0)]
    assert route(1000, prefill, [worker("d", sequences=9)], "always", slo=Slo(ttft_s=0.25)).prefill == "far"


def test_a_prefix_to_be_pulled_counts_for_the_reader():
    """`b` is next to no worker that has the prefix; `a` reads behind 300 tokens and can pull 900."""
    fields = {"kv_token_bytes": 1000}
    holder = worker("d", matched=900, sequences=9, **fields)
    others = [worker("a", waiting=300, **fields), worker("b", kv_takes=frozenset(["class"]), **fields)]
    holder = holder._replace(kv_gives=frozenset(["form bf16"]))
    assert route(1000, others, [holder, worker("e", sequences=9)], "always").prefill == "a"
    assert (
        route(1000, others, [holder._replace(num_matched_tokens=0), worker("e", sequences=9)], "always").prefill == "b"
    )


def test_no_prefill_worker():
    assert route(1000, [], [worker("d")]) == Decision(None, "d", "no_prefill_worker")
    with pytest.raises(NoRoute):
        route(1000, [], [worker("d")], "always")
    with pytest.raises(NoRoute):
        route(1000, [worker("p")], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_gives": frozenset(["other"])},
        {"kv_gives": frozenset()},
        {"transports": frozenset(["shm"]), "host_id": "there"},
    ],
)
def test_pairs_that_do_not_fit_are_never_routed_together(fields):
    odd = worker("odd", **fields)
    assert not compatible(odd, worker("d"))
    assert route(1000, [odd], [worker("d")]) == Decision(None, "d", "no_prefill_worker")
    assert (
        choose_prefill_for_taker(RoutingRequest(1000, 1001), [odd, worker("p", waiting=9000)], worker("d")).name == "p"
    )


def test_a_source_whose_kv_does_not_come_is_left_by_that_taker():
    sources, taker = [worker("p"), worker("q", waiting=9000)], worker("d", sequences=9)
    assert route(1000, sources, [taker]) == Decision("p", "d", "long_prompt")
    assert route(1000, sources, [taker._replace(no_kv_from=frozenset("p"))]) == Decision("q", "d", "long_prompt")
    alone = taker._replace(no_kv_from=frozenset("pq"))
    assert route(1000, sources, [alone]) == Decision(None, "d", "no_prefill_worker")
    assert choose_holder(alone, [worker("p", matched=960, kv_token_bytes=1000)]) is None


@pytest.mark.parametrize("names", [["shm"], ["cuda_ipc"], ["cuda_ipc", "shm"], ["inproc", "shm"]])
def test_memory_that_is_shared_needs_one_host(names):
    shared = frozenset(names)
    assert compatible(worker("p", transports=shared), worker("d", transports=shared))
    there = worker("d", transports=shared, host_id="there")
    assert not compatible(worker("p", transports=shared), there)
    both = shared | {"tcp"}
    assert not compatible(worker("p", transports=both), there)
    assert compatible(worker("p", transports=both), there._replace(transports=both))


@pytest.mark.parametrize("name", ["nixl", "cuda_ipc"])
def test_what_moves_runs_of_bytes_is_for_blocks_that_are_alike(name):
    """Else each fetch of theirs would fail; a layout with a state has no form that is alike."""
    alone, beside = frozenset([name]), frozenset([name, "tcp"])
    for forms, are_alike in ((b"aa", True), (b"ab", False)):
        p, d = (worker(each, kv_layout=bytes([form])) for each, form in zip("pd", forms))
        assert compatible(p._replace(transports=alone), d._replace(transports=beside)) == are_alike
        assert compatible(p._replace(transports=beside), d._replace(transports=beside))
    keep_states = [worker(each, transports=alone, kv_layout=b"") for each in "pd"]
    assert not compatible(*keep_states)
    with pytest.raises(NoRoute, match="no prefill worker serves that a decode worker can take KV from"):
        route(1000, keep_states[:1], keep_states[1:], "always")


def test_too_long_for_a_worker():
    assert (
        route(1000, [], [worker("small", limits=WorkerLimits(512)), worker("d", sequences=9)], max_len=1001).decode
        == "d"
    )
    with pytest.raises(NoRoute):
        route(5000, [], [worker("d")], max_len=5001)


_LIMITS = st.builds(
    WorkerLimits, st.integers(1, 200), st.sampled_from([0, 1, 3, 9, 20]), st.sampled_from([0, 8, 16])
).map(lambda limits: limits if limits.num_blocks and limits.block_size else WorkerLimits(limits.max_model_len))
_KV = st.sampled_from([frozenset("a"), frozenset("b"), frozenset("ab")])
_LOAD = st.integers(0, 50)
_WORKERS = st.lists(st.tuples(_LIMITS, _KV, _KV, _LOAD, _LOAD), max_size=6)


def _workers(role: str, drawn) -> list[Candidate]:
    return [
        worker(f"{role}{i}", sequences=sequences, waiting=waiting, limits=limits, kv_gives=gives, kv_takes=takes)
        for i, (limits, gives, takes, sequences, waiting) in enumerate(drawn)
    ]


@settings(max_examples=300)
@given(_WORKERS, _WORKERS, st.integers(1, 200), st.integers(1, 60), st.integers(1, 4), st.sampled_from(SPLITS))
def test_the_chosen_worker_can_hold_it_and_one_is_chosen_if_any_can(
    prefill, decode, num_tokens, max_tokens, num_choices, split
):
    prefill, decode = _workers("p", prefill), _workers("d", decode)
    ask = RoutingRequest(num_tokens, num_tokens + max_tokens, num_choices=num_choices)
    able = {each.name: each for each in decode if can_decode(ask, each.limits)}
    pairs = {
        (source.name, taker) for source in prefill for taker in able
        if source.limits.max_model_len > num_tokens and compatible(source, able[taker])
    }  # fmt: skip
    too_short = any(compatible(source, taker) for source in prefill for taker in able.values())
    try:
        decision = choose(ask, prefill, decode, split)
    except NoRoute:
        assert not able or (split == "always" and not pairs and not too_short)
        return
    assert decision.decode in able
    assert decision.prefill is None or (decision.prefill, decision.decode) in pairs
    assert (decision.prefill is not None) == bool(pairs) or split != "always"
    for taker in able.values():
        source = choose_prefill_for_taker(ask, prefill, taker)
        assert (source is not None) == any(name == taker.name for _, name in pairs)
        assert source is None or (source.name, taker.name) in pairs


@settings(max_examples=300)
@given(_LIMITS, st.integers(1, 200), st.integers(1, 60), st.integers(1, 4))
def test_what_is_held_is_what_an_engine_takes(limits, num_tokens, max_tokens, num_choices):
    """The rules of gateway/routing/routing.py and of engine/schedule/admission.py are one."""
    block_size = limits.block_size
    max_model_len = min(limits.max_model_len, limits.num_blocks * block_size)
    if max_model_len < 2:
        return  # no engine is so small
    engine = toy_engine(
        block_size=block_size, num_blocks=limits.num_blocks, max_model_len=max_model_len, max_num_seqs=8
    )
    ask = RoutingRequest(num_tokens, num_tokens + max_tokens, num_choices=num_choices)
    request = engine_request("a", [1] * num_tokens, max_tokens, n=num_choices)
    for verb, can_hold in ((engine.admission.admit, can_decode), (engine.admission.accept, can_prefill)):
        try:
            verb(request)
            engine.cancel(request.key)
            engine.step()
            is_taken = True
        except Refusal as refusal:
            is_taken = refusal.reason != "too_long"
        assert is_taken == can_hold(ask, limits._replace(max_model_len=max_model_len))


def test_a_holder_gives_its_prefix_however_short_it_is():
    """It has the spans, and is asked for nothing else."""
    holder = worker("p", matched=448, kv_token_bytes=100, limits=WorkerLimits(450))
    reader = worker("q", kv_token_bytes=100, pace=Pace(prefill_token_s=1e-3))
    assert choose_holder(reader, [holder]) is holder
    assert choose(RoutingRequest(900, 1000), [holder, reader], [worker("d", sequences=9)]).prefill == "q"


def test_equal_workers_are_chosen_by_name_and_rested_ones_first():
    assert route(1000, [worker("b"), worker("a")], [worker("d"), worker("c")], "always") == Decision("a", "c", "forced")
    prefill, decode = [worker("b"), worker("a", utilization=0.1)], [worker("d"), worker("c", utilization=0.1)]
    assert route(1000, prefill, decode, "always") == Decision("b", "d", "forced")


def test_what_a_decision_says():
    decision = route(1000, [worker("p", waiting=500)], [worker("d", sequences=4)])
    assert decision.alternative == "d alone" and decision.alternative_s > decision.cost_s > decision.ttft_s
    assert decision.ttft_s == pytest.approx(0.1 + 0.005 + 0.2 + 0.002)
    assert decision.idle_ttft_s == pytest.approx(decision.ttft_s - 0.1)
    assert decision.tpot_s == pytest.approx(0.02 + 5 * 0.0005) and decision.idle_tpot_s < decision.tpot_s


# ---- properties ----

NAMES = st.integers(0, 10**6)
PACES = st.builds(
    Pace,
    prefill_base_s=st.floats(0.001, 0.1),
    transfer_base_s=st.floats(0, 0.1),
    prefill_token_s=st.floats(1e-6, 1e-2),
    decode_base_s=st.floats(1e-4, 0.2),
    decode_sequence_s=st.floats(0, 0.01),
    transfer_byte_s=st.sampled_from([0.0, 1e-10, 1e-8]),
)


def workers(prefix: str, least: int):
    made = st.builds(
        worker,
        name=NAMES.map(lambda number: f"{prefix}{number}"),
        matched=st.integers(0, 31).map(lambda spans: 64 * spans),
        sequences=st.integers(0, 64),
        waiting=st.integers(0, 20_000),
        pace=PACES,
        kv_token_bytes=st.sampled_from([0, 1000, 200_000]),
        kv_gives=st.sampled_from([WORDS, frozenset(["class"]), frozenset(["other"])]),
        host_id=st.sampled_from(["one", "two"]),
        transports=st.sampled_from([frozenset(["tcp", "shm"]), frozenset(["shm"])]),
        utilization=st.floats(0, 1),
        tightest_tpot_s=st.sampled_from([None, 0.05]),
    )
    return st.lists(made, min_size=least, max_size=8, unique_by=lambda each: each.name)


def pair_s(ask: RoutingRequest, source: Candidate, taker: Candidate, holders: list[Candidate]) -> float:
    """Return the cost of one pair by itself."""
    reading = routing._remote_prefill_cost(ask, source, holders)
    at_taker_s = routing._decode_cost_s(ask, taker) + routing._unhidden_s(ask, reading, taker)
    return reading.cost_s + at_taker_s + routing._HOP_S


@settings(max_examples=200)
@given(workers("p", 0), workers("d", 1), st.sampled_from([Slo(), Slo(0.3, 0.05)]), st.randoms(use_true_random=False))
def test_any_choice_fits_and_is_the_best_of_all_pairs(prefill, decode, slo, rng):
    """The search that ends early finds what trying every pair finds; order of workers does not matter."""
    ask = RoutingRequest(2049, 2050, slo=slo)
    decision = choose(ask, prefill, decode)
    by_name = {each.name: each for each in (*prefill, *decode)}
    assert decision.decode in by_name
    assert decision.is_local or compatible(by_name[decision.prefill], by_name[decision.decode])
    assert decision.alternative_s is None or decision.cost_s <= decision.alternative_s
    assert 0 < decision.idle_ttft_s <= decision.ttft_s + 1e-9
    mixed = rng.sample(prefill, len(prefill)), rng.sample(decode, len(decode))
    assert choose(ask, *mixed) == decision
    alone = choose(ask, prefill, decode, "never")
    assert alone.prefill is None and decision.cost_s <= alone.cost_s
    pairs = [(p, d) for p in prefill for d in decode if compatible(p, d)]
    assert bool(pairs) == (decision.reason != "no_prefill_worker")
    if pairs:
        holders = routing._prefix_holders([*prefill, *decode])
        best_s = min(pair_s(ask, p, d, holders) for p, d in pairs)
        assert choose(ask, prefill, decode, "always").cost_s == pytest.approx(best_s)


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(0, 60), st.randoms(use_true_random=False))
def test_a_request_looks_at_a_bounded_number(num_workers, num_holders, rng):
    everybody = list(range(num_workers))
    holders = rng.sample(everybody, min(num_holders, num_workers))
    dead = set(rng.sample(everybody, num_workers // 10))
    chosen = shortlist(iter(holders), everybody, lambda item: item not in dead, rng)
    assert len(chosen) <= NUM_HOLDERS + NUM_DRAWN and len(set(chosen)) == len(chosen) and not dead & set(chosen)
    assert set([item for item in holders if item not in dead][:NUM_HOLDERS]) <= set(chosen)


@pytest.mark.parametrize("seed", range(20))
def test_those_that_may_be_asked_are_found_among_many_that_may_not(seed):
    assert shortlist((), range(20), lambda item: item == 7, random.Random(seed)) == [7]
    few = shortlist((), range(1000), lambda item: item < 30, random.Random(seed))
    assert 1 <= len(set(few)) == len(few) <= NUM_DRAWN and max(few) < 30


# ---- prefixes to be pulled ----

KV = {"kv_token_bytes": 100_000, "pace": Pace(prefill_token_s=1e-4)}


@pytest.mark.parametrize(
    "matched, fields, chosen",
    [
        (640, {}, "d"),  # 64 ms to compute, 5 and 32 to pull
        (64, {}, None),  # 6 against 5 and 3
        (640, {"host_id": "there"}, None),  # 5 and 64
        (640, {"kv_token_bytes": 0}, None),
        (640, {"kv_gives": frozenset(["other"])}, None),
    ],
)
def test_a_prefix_is_pulled_where_that_is_quicker(matched, fields, chosen):
    holders = [worker("d", matched=matched, **{**KV, **fields}), worker("a", **KV)]
    found = choose_holder(worker("p", **KV), holders)
    assert (found and found.name) == chosen
    assert choose_holder(worker("p", matched=matched, **KV), holders) is None
    assert choose_holder(worker("p", **{**KV, "pace": Pace(prefill_token_s=1e-6)}), holders) is None


def test_measured_transfers_count():
    reader = worker("p", **{**KV, "pace": Pace(prefill_token_s=1e-4, transfer_byte_s=1e-8)})
    assert choose_holder(reader, [worker("d", matched=640, **KV)]) is None


def test_the_holder_of_more_gives():
    holders = [worker("a", matched=640, **KV), worker("b", matched=1280, **KV), worker("c", matched=1280, **KV)]
    assert choose_holder(worker("p", matched=320, **KV), holders).name == "b"


def test_two_choices_balance_a_large_fleet():
    """10,000 requests over 1,000 workers that know nothing but how many they have."""
    rng, loads = random.Random(1), [0] * 1000
    for _ in range(10_000):
        drawn = shortlist((), range(1000), lambda item: True, rng)
        decision = choose(RoutingRequest(50, 51), [], [worker(f"{each:04}", sequences=loads[each]) for each in drawn])
        loads[int(decision.decode)] += 1
    assert max(loads) <= 1.3 * 10
