import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.service.errors import InvalidRequest, Overloaded
from gateway.queue.quota_file import Quota, read_quotas, usage_name
from gateway.queue.quotas import Quotas, Reservation
from gateway.queue.token_bucket import UsageCounts


def expect_refusal(quotas: Quotas, tenant: str, at: float, num_choices: int = 1) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        quotas.enter(tenant, at, num_choices)
    return caught.value


def use(quotas: Quotas, tenant: str, num_tokens: int, at: float) -> Reservation:
    """A request that uses all that it reserves, and still runs."""
    reservation = quotas.enter(tenant, at)
    reservation.reserve(num_tokens, at)
    return reservation


def usage_elsewhere(num_reserved: int, num_returned: int = 0, balance: float = 500.0, num_running: int = 0) -> dict:
    return {"other": {"a": UsageCounts(num_running, num_reserved, num_returned, balance)}}


def test_choices_at_once():
    quotas = Quotas({"a": Quota(concurrent_requests=8)})
    large = quotas.enter("a", 0.0, 5)
    error = expect_refusal(quotas, "a", 0.0, 4)
    assert error.reason == "TENANT_REQUESTS" and "concurrent_requests" in error.message and error.retry_after_s > 0
    small = quotas.enter("a", 0.0, 3)
    expect_refusal(quotas, "a", 0.0)
    for _ in range(10):
        quotas.enter("b", 0.0, 8)  # nobody bounds it
    large.settle(0, 0.0)
    quotas.enter("a", 0.0, 5)
    expect_refusal(quotas, "a", 0.0)
    small.settle(0, 0.0)
    with pytest.raises(InvalidRequest, match="sampling.n: is 9, and concurrent_requests of this tenant is 8"):
        quotas.enter("a", 0.0, 9)


def test_tokens_a_second():
    quotas = Quotas({"default": Quota(100.0, 500.0)})
    for tenant in ("a", "b"):
        use(quotas, tenant, 700, 0.0).settle(700, 0.0)
    error = expect_refusal(quotas, "a", 1.0)
    assert error.reason == "TENANT_TOKENS" and "tokens_per_s" in error.message
    assert error.retry_after_s == pytest.approx(1.01)  # 100 short, and one to go
    expect_refusal(quotas, "b", 1.9)
    quotas.enter("a", 2.1)


def test_one_model_beside_all(tmp_path):
    """Requests of a bounded model use up its quota and the tenant's, others the tenant's alone."""
    path = tmp_path / "quotas.toml"
    path.write_text("[a]\ntokens_per_s = 100\n[a.models.'my chat']\nconcurrent_requests = 2\ntokens_per_s = 10\n")
    quotas = Quotas.read(path)
    first, second = (quotas.enter("a", 0.0, model="my chat") for _ in range(2))
    with pytest.raises(Overloaded, match="has 2 choices of my chat running") as caught:
        quotas.enter("a", 0.0, model="my chat")
    assert caught.value.reason == "TENANT_REQUESTS"
    with pytest.raises(InvalidRequest, match="concurrent_requests of my chat of this tenant is 2"):
        quotas.enter("a", 0.0, 3, model="my chat")
    assert quotas.max_concurrent("a", "my chat") == 2 and quotas.max_concurrent("a", "code") is None
    first.reserve(100, 0.0)
    second.settle(0, 0.0)
    with pytest.raises(Overloaded, match="quota of my chat of 10 tokens_per_s") as caught:
        quotas.enter("a", 0.0, model="my chat")
    assert caught.value.reason == "TENANT_TOKENS"
    use(quotas, "a", 900, 0.0)
    expect_refusal(quotas, "a", 0.0)
    first.settle(0, 0.0)
    assert {name: counts.balance for name, counts in quotas.counts(0.0).items()}["a"] == 100
    quotas.enter("a", 0.0, model="my chat")
    quotas.enter("b", 0.0, 9, model="my chat")  # nobody bounds it


def test_models_of_all_others():
    """The default's bounds of a model are those of tenants without a table, each by itself."""
    bounded = Quota(concurrent_requests=1)
    quotas = Quotas({"default": Quota(), usage_name("default", "chat"): bounded, "a": Quota()})
    for tenant in ("b", "c"):
        quotas.enter(tenant, 0.0, model="chat")
        with pytest.raises(Overloaded):
            quotas.enter(tenant, 0.0, model="chat")
        quotas.enter(tenant, 0.0, model="code")
    for _ in range(3):
        quotas.enter("a", 0.0, model="chat")


def test_a_tenant_with_models_alone_keeps_the_bounds_of_all_others(tmp_path):
    path = tmp_path / "quotas.toml"
    path.write_text(
        "[default]\ntokens_per_s = 100\nmax_priority = 2\n[default.models.code]\nconcurrent_requests = 3\n"
        "[default.models.chat]\nconcurrent_requests = 9\n[a.models.chat]\nconcurrent_requests = 1\n"
        "[b]\n[c]\ntokens_per_s = 5\n[c.models.chat]\nconcurrent_requests = 1\n"
    )
    quotas = Quotas.read(path)
    assert quotas.quota("a") == quotas.quota("another") == Quota(100, 1000, None, 2)
    assert [quotas.max_concurrent(tenant, "chat") for tenant in ("a", "b", "c", "another")] == [1, None, 1, 9]
    assert [quotas.max_concurrent(tenant, "code") for tenant in ("a", "b", "c", "another")] == [3, None, None, 3]
    assert quotas.quota("b") == Quota() and quotas.quota("c").tokens_per_s == 5


def test_a_rest_saves_up_one_burst():
    quotas = Quotas({"a": Quota(100.0, 500.0)})
    quotas.enter("a", 0.0)
    use(quotas, "a", 501, 1e6)
    expect_refusal(quotas, "a", 1e6)


def test_what_a_request_may_come_to_is_set_aside_until_it_has_ended():
    quotas = Quotas({"a": Quota(100.0, 500.0)})
    first, second = quotas.enter("a", 0.0), quotas.enter("a", 0.0)  # both are being tokenized
    first.reserve(600, 0.0)
    with pytest.raises(Overloaded) as caught:
        second.reserve(1, 0.0)
    assert caught.value.reason == "TENANT_TOKENS"
    second.settle(0, 0.0)
    expect_refusal(quotas, "a", 0.5)
    first.settle(10, 0.5)
    use(quotas, "a", 400, 0.5)


TENANTS = ("a", "b", "c")
OPERATIONS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(TENANTS), st.integers(1, 8)),
    st.tuples(st.just("reserve"), st.integers(0, 20), st.integers(0, 400)),
    st.tuples(st.just("settle"), st.integers(0, 20), st.floats(0, 1)),
    st.tuples(st.just("pass"), st.floats(0, 3), st.none()),
)


@given(st.lists(OPERATIONS, max_size=120))
def test_all_that_is_reserved_is_settled_once(operations):
    """In any order of operations, some of them twice: the counts equal what open requests hold, and no tenant gets more
    than its burst, its rate and one request."""
    table = {"a": Quota(100.0, 500.0, 16), "b": Quota(50.0, 50.0), "c": Quota(concurrent_requests=9)}
    quotas, at = Quotas(table), 0.0
    running, used = [], dict.fromkeys(TENANTS, 0)
    for kind, which, value in operations:
        if kind == "pass":
            at += which
        elif kind == "enter":
            try:
                reservation = quotas.enter(which, at, value)
            except Overloaded:
                continue
            running.append([reservation, which, value, 0])
        elif kind == "reserve" and running:
            request = running[which % len(running)]
            try:
                request[0].reserve(value, at)
            except Overloaded:
                continue
            request[3] += value
        elif kind == "settle" and running:
            reservation, tenant, _, num_reserved = running.pop(which % len(running))
            used[tenant] += (num_used := int(value * num_reserved))
            reservation.settle(num_used, at)
            reservation.settle(0, at)
        for tenant, usage in quotas._buckets.items():
            mine = [request for request in running if request[1] == tenant]
            assert usage.num_running == sum(request[2] for request in mine)
            num_out = usage.num_reserved - usage.num_returned - sum(request[3] for request in mine)
            assert 0 <= num_out <= used[tenant]  # the rest was counted before it had been idle
    for reservation, *_ in running:
        reservation.settle(0, at)
    assert not any(usage.num_running for usage in quotas._buckets.values())
    assert used["a"] <= 500 + 100 * at + 400 and used["b"] <= 50 + 50 * at + 400


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 400), st.floats(0, 1)), max_size=60))
def test_no_tenant_gets_more_than_its_rate_and_one_burst_and_one_request(requests):
    quotas, at, used = Quotas({"a": Quota(100.0, 500.0)}), 0.0, 0
    for pause_s, num_tokens, share in requests:
        at += pause_s
        try:
            reservation = quotas.enter("a", at)
        except Overloaded:
            continue
        reservation.reserve(num_tokens, at)
        used += (num_used := int(share * num_tokens))
        reservation.settle(num_used, at)
    assert used <= 500 + 100 * at + 400


def test_who_is_idle_is_forgotten_and_its_counts_do_not_fall():
    quotas = Quotas({"a": Quota(100.0, 500.0), "default": Quota(concurrent_requests=5)})
    use(quotas, "a", 300, 0.0).settle(200, 0.0)
    for i in range(100):
        quotas.enter(f"t{i}", 0.0).settle(0, 0.0)
    quotas.enter("b", 1.5)
    assert set(quotas._buckets) == {"a", "b"}
    quotas.enter("b", 3.0)
    assert set(quotas._buckets) == {"b"}
    use(quotas, "a", 1, 3.0)
    assert quotas.counts(3.0)["a"][1:3] == (301, 300)


# ---- other gateways ----


def test_gateways_are_told_which_tenant_uses_most():
    quotas = Quotas({"default": Quota(concurrent_requests=5)})
    for i in range(400):
        quotas.enter(f"t{i}", 0.0, 1 + (i >= 200))
    assert len(quotas.counts(0.0)) == 256 and {f"t{i}" for i in range(200, 400)} < set(quotas.counts(0.0))


def test_counts_that_fall_fill_no_bucket():
    quotas = Quotas({"a": Quota(100.0, 1000.0)})
    use(quotas, "a", 900, 0.0)
    for counts in ((500_000, 0), (10, 0), (0, 0), (500_000, 500_000)):
        quotas.note_others(usage_elsewhere(*counts), 0.0)
        assert quotas.counts(0.0)["a"].balance <= 100


def test_what_another_gateway_gives_back_is_at_most_what_it_took():
    quotas = Quotas({"a": Quota(100.0, 1000.0)})
    use(quotas, "a", 900, 0.0)
    for counts, balance in (((5000, 4800), 100), ((5050, 4800), 50), ((5050, 4830), 80), ((5050, 5050), 100)):
        quotas.note_others(usage_elsewhere(*counts), 0.0)
        assert quotas.counts(0.0)["a"].balance == balance
    quotas.note_others({}, 0.0)
    quotas.note_others(usage_elsewhere(10, 0, -70.0), 0.0)  # it has restarted, and knows of more than this one
    assert quotas.counts(0.0)["a"].balance == -70
    quotas.note_others(usage_elsewhere(10, 10), 0.0)
    assert quotas.counts(0.0)["a"].balance == -60


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 2000), st.integers(0, 2000), st.integers(-(10**6), 10**6)),
        max_size=40,
    )
)
def test_nothing_that_is_told_fills_a_bucket(tellings):
    """A tenant uses its quota, and another gateway reports anything: never more than burst and rate."""
    quotas, at, used = Quotas({"a": Quota(100.0, 500.0)}), 0.0, 0
    for pause_s, num_reserved, num_returned, balance in tellings:
        at += pause_s
        quotas.note_others(usage_elsewhere(num_reserved, min(num_returned, num_reserved), balance), at)
        try:
            use(quotas, "a", 50, at).settle(50, at)
            used += 50
        except Overloaded:
            pass
    assert used <= 500 + 100 * at + 50


@pytest.mark.parametrize("told", [[(0, 0, -float(1 << 53))], [(0, 0, 500.0), (1 << 53, 0, 500.0)]])
def test_what_one_gateway_tells_locks_no_tenant_out_for_long(told):
    """A count that no gateway of this stack can have, and then none any more: a few bursts are missing, not years."""
    quotas = Quotas({"a": Quota(100.0, 1000.0)})
    use(quotas, "a", 10, 0.0)
    for counts in told:
        quotas.note_others(usage_elsewhere(*counts), 0.0)
    quotas.note_others({}, 0.0)
    assert expect_refusal(quotas, "a", 0.0).reason == "TENANT_TOKENS"
    use(quotas, "a", 10, 41.0)
    assert quotas.counts(200.0)["a"].balance == 1000.0


def test_answers_of_any_length_keep_to_the_rate_of_all_gateways():
    """What they use beyond their reservation, bit by bit and far below what the bucket holds, is missing everywhere."""
    rate, length, seconds = 100.0, 8_000, 7_200
    gateways = [Quotas({"a": Quota(rate, 1000.0)}) for _ in range(4)]
    running: list[tuple[Reservation, int]] = []
    num_used = 0
    for half_second in range(2 * seconds):
        at = half_second / 2
        for each in random.sample(gateways, len(gateways)):
            with contextlib.suppress(Overloaded):
                while len(running) < 64:
                    running.append((use(each, "a", 256, at), half_second))
        for reservation, begun in running:
            reservation.cover(25 * (half_second - begun), at)
            num_used += 25
        for done in [each for each in running if 25 * (half_second - each[1]) >= length]:
            done[0].settle(length, at)
            running.remove(done)
        counts = [each.counts(at) for each in gateways]
        for index, each in enumerate(gateways):
            others = {f"g{other}": told for other, told in enumerate(counts) if other != index}
            each.note_others(others, at)
    assert num_used <= 1.1 * rate * seconds  # it was 1.5 times


@pytest.mark.parametrize("num_tokens", [50, 2_000])
def test_what_all_gateways_let_in_at_once_is_missing_afterwards(num_tokens):
    """Of requests that are larger than the burst too."""
    quotas = Quotas({"a": Quota(100.0, 500.0)})
    use(quotas, "a", num_tokens, 0.0)
    told = {f"g{i}": {"a": UsageCounts(0, 0, 0, 500.0)} for i in range(7)}
    quotas.note_others(told, 0.0)
    told = {name: {"a": UsageCounts(1, 500 + num_tokens, 0, -num_tokens)} for name in told}
    quotas.note_others(told, 0.0)
    assert quotas.counts(0.0)["a"].balance == 500 - num_tokens - 7 * (500 + num_tokens)


def test_a_tenant_that_comes_here_late_brings_what_it_uses_elsewhere():
    quotas = Quotas({"a": Quota(100.0, 500.0, 4)})
    quotas.note_others(usage_elsewhere(700, 0, -200.0, 4), 0.0)
    assert not quotas._buckets, "a report alone makes no entry"
    assert expect_refusal(quotas, "a", 0.0).reason == "TENANT_REQUESTS"
    quotas.note_others(usage_elsewhere(700, 0, -200.0, 0), 0.0)
    assert expect_refusal(quotas, "a", 0.0).reason == "TENANT_TOKENS"


# ---- the file ----


def test_quotas_are_read_from_a_file(tmp_path):
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\ntokens_per_s = 50\n[a]\nconcurrent_requests = 3\nmax_priority = 4\n")
    assert read_quotas(path) == {"default": Quota(50, 500), "a": Quota(concurrent_requests=3, max_priority=4)}
    assert Quotas(read_quotas(path)).quota("a").max_priority == 4
    assert Quotas({}).quota("a").max_priority == Quotas(read_quotas(path)).quota("b").max_priority == 0
    assert read_quotas(None) == {}


@pytest.mark.parametrize(
    "text, said",
    [
        ("a = 3", "a is not a table"),
        ("[a]\ntokens = 3", r"\[a\] tokens is not one of tokens_per_s"),
        ("[a]\ntokens_per_s = 0", "over 0"),
        ("[a]\ntokens_per_s = true", "over 0"),
        ("[a]\nconcurrent_requests = 2.5", "over 0"),
        ("[a]\nmax_priority = 1.0", "over 0"),
        ("[a]\nburst_tokens = 5", "no effect"),
        ("[a]\nmodels = 3", r"\[a\] models is not a table"),
        ("[a.models]\nchat = 3", "a.models.chat is not a table"),
        ("[a.models.chat]\nmax_priority = 3", r"\[a.models.chat\] max_priority is not one of tokens_per_s"),
        ("[a", "quotas.toml"),
    ],
)
def test_a_file_that_cannot_be_meant(tmp_path, text, said):
    path = tmp_path / "quotas.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_quotas(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_the_file_is_read_again(tmp_path, caplog):
    path = tmp_path / "quotas.toml"
    path.write_text("[a]\nconcurrent_requests = 1\n")
    quotas = Quotas(read_quotas(path), path)
    first = quotas.enter("a", 10.0)
    expect_refusal(quotas, "a", 12.0)
    path.write_text("[a]\nconcurrent_requests = 2\ntokens_per_s = 10\n")
    quotas.enter("a", 14.0).reserve(120, 16.0)  # 100 was saved up
    expect_refusal(quotas, "a", 16.0)
    first.settle(0, 16.0)
    assert expect_refusal(quotas, "a", 16.1).reason == "TENANT_TOKENS"
    path.write_text("[a]\nconcurrent_requests = no\n")  # half written
    assert expect_refusal(quotas, "a", 17.2).reason == "TENANT_TOKENS" and "the old ones stay in use" in caplog.text
    path.write_text("[b]\nconcurrent_requests = 1\n")
    quotas.enter("a", 18.4)  # nothing bounds it any more


def test_another_quota_fills_no_bucket(tmp_path):
    path = tmp_path / "quotas.toml"
    path.write_text("[a]\ntokens_per_s = 10\n")
    quotas = Quotas(read_quotas(path), path)
    use(quotas, "a", 300, 0.0)  # of 100
    path.write_text("[a]\ntokens_per_s = 20\nburst_tokens = 500\n")
    assert expect_refusal(quotas, "a", 5.0).reason == "TENANT_TOKENS" and quotas.counts(5.0)["a"].balance == -150


def test_a_missing_file_of_quotas_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_quotas(tmp_path / "nothing.toml")
