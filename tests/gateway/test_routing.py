from dataclasses import replace

import pytest

from gateway.routing import Candidate, Decision, NoRoute, choose, choose_holder, choose_source, compatible

WORDS = frozenset(["class", "form bf16"])
BASE = Candidate("", 0, 0, 0, 4096, WORDS, WORDS, frozenset(["tcp"]), "host")


def worker(name: str, matched: int = 0, sequences: int = 0, waiting: int = 0, **fields) -> Candidate:
    return replace(
        BASE, name=name, num_matched_tokens=matched, num_sequences=sequences, num_waiting_tokens=waiting, **fields
    )


def route(num_tokens: int, prefill, decode, split: str = "auto", max_len: int = 100) -> Decision:
    return choose(num_tokens, max_len, prefill, decode, split)


def test_a_long_prompt_is_split():
    assert route(1000, [worker("p")], [worker("d")]) == Decision("p", "d", "long_prompt")


@pytest.mark.parametrize(
    "num_tokens, decode, reason",
    [
        (64, worker("d", sequences=9), "short_prompt"),
        (1000, worker("d", matched=960, sequences=9), "hot_cache"),
        (128, worker("d"), "idle"),
        (1000, worker("d", matched=800, sequences=1), "hot_cache"),
    ],
)
def test_what_stays_on_the_decode_worker(num_tokens, decode, reason):
    assert route(num_tokens, [worker("p")], [decode]) == Decision(None, "d", reason)
    assert route(num_tokens, [worker("p")], [decode], "always") == Decision("p", "d", "forced")
    assert route(num_tokens, [worker("p")], [decode], "never") == Decision(None, "d", "forced")


def test_a_busy_decode_worker_is_not_disturbed():
    assert route(128, [worker("p")], [worker("d", sequences=1)]).prefill == "p"
    assert route(1000, [worker("p", matched=960)], [worker("d", matched=800, sequences=1)]).prefill == "p"


def test_the_prefill_worker_with_the_prefix():
    assert route(1000, [worker("a"), worker("b", matched=640)], [worker("d")]).prefill == "b"
    assert route(1000, [worker("a"), worker("b", matched=640, waiting=2000)], [worker("d")]).prefill == "a"


def test_the_decode_worker_with_room():
    assert route(1000, [worker("p")], [worker("a", sequences=3), worker("b")]).decode == "b"
    assert route(2000, [worker("p")], [worker("a", matched=1280, sequences=1), worker("b")]).decode == "a"


def test_no_prefill_worker():
    assert route(1000, [], [worker("d")]) == Decision(None, "d", "no_prefill_worker")
    with pytest.raises(NoRoute):
        route(1000, [], [worker("d")], "always")
    with pytest.raises(NoRoute):
        route(1000, [worker("p")], [])


@pytest.mark.parametrize(
    "fields",
    [{"kv_gives": frozenset(["other"])}, {"kv_gives": frozenset()}, {"transports": frozenset(["shm"]), "host_id": "there"}],
)
def test_pairs_that_do_not_fit_are_never_routed_together(fields):
    odd = worker("odd", **fields)
    assert not compatible(odd, worker("d"))
    assert route(1000, [odd], [worker("d")]) == Decision(None, "d", "no_prefill_worker")
    assert choose_source(1000, [odd, worker("p", waiting=9000)], worker("d")).name == "p"


def test_shared_memory_needs_one_host():
    shm = frozenset(["shm"])
    assert compatible(worker("p", transports=shm), worker("d", transports=shm))
    assert not compatible(worker("p", transports=shm), worker("d", transports=shm, host_id="there"))


def test_too_long_for_a_worker():
    assert route(1000, [], [worker("small", max_model_len=512), worker("d", sequences=9)], max_len=1001).decode == "d"
    with pytest.raises(NoRoute):
        route(5000, [], [worker("d")], max_len=5001)


def test_equal_workers_are_chosen_by_name():
    assert route(1000, [worker("b"), worker("a")], [worker("d"), worker("c")]) == Decision("a", "c", "long_prompt")


KV = {"kv_token_bytes": 100_000, "prefill_tokens_per_s": 10_000.0}


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
    assert choose_holder(worker("p", **{**KV, "prefill_tokens_per_s": 1e6}), holders) is None


def test_the_holder_of_more_gives():
    holders = [worker("a", matched=640, **KV), worker("b", matched=1280, **KV), worker("c", matched=1280, **KV)]
    assert choose_holder(worker("p", matched=320, **KV), holders).name == "b"
