import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.service.errors import Overloaded
from gateway.quotas import Quota, Quotas, read_quotas


def refused(quotas: Quotas, tenant: str, at: float) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        quotas.enter(tenant, at)
    return caught.value


def test_requests_at_once():
    quotas = Quotas({"a": Quota(concurrent_requests=2)})
    quotas.enter("a", 0.0)
    quotas.enter("a", 0.0)
    error = refused(quotas, "a", 0.0)
    assert error.reason == "TENANT_REQUESTS" and "concurrent_requests" in error.message and error.retry_after_s > 0
    for _ in range(10):
        quotas.enter("b", 0.0)  # nobody bounds it
    quotas.leave("a")
    quotas.enter("a", 0.0)


def test_tokens_a_second():
    quotas = Quotas({"default": Quota(100.0, 500.0)})
    for tenant in ("a", "b"):
        quotas.enter(tenant, 0.0)
        quotas.pay(tenant, 700, 0.0)
    error = refused(quotas, "a", 1.0)
    assert error.reason == "TENANT_TOKENS" and "tokens_per_s" in error.message
    assert error.retry_after_s == pytest.approx(1.01)  # 100 short, and one to go
    quotas.enter("a", 2.1)
    quotas.pay("b", 1000, 2.0)
    refused(quotas, "b", 10.0)


def test_a_rest_saves_up_one_burst():
    quotas = Quotas({"a": Quota(100.0, 500.0)})
    quotas.enter("a", 0.0)
    quotas.enter("a", 1e6)
    quotas.pay("a", 501, 1e6)
    refused(quotas, "a", 1e6)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 400)), max_size=60))
def test_no_tenant_gets_more_than_its_rate_and_one_burst_and_one_request(requests):
    quotas, at, used = Quotas({"a": Quota(100.0, 500.0)}), 0.0, 0
    for pause_s, num_tokens in requests:
        at += pause_s
        try:
            quotas.enter("a", at)
        except Overloaded:
            continue
        quotas.pay("a", num_tokens, at)
        quotas.leave("a")
        used += num_tokens
    assert used <= 500 + 100 * at + 400


def test_the_file(tmp_path):
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\ntokens_per_s = 50\n[a]\nconcurrent_requests = 3\n")
    assert read_quotas(path) == {"default": Quota(50, 500), "a": Quota(concurrent_requests=3)}
    assert read_quotas(None) == {}


@pytest.mark.parametrize(
    "text, said",
    [
        ("a = 3", "a is no table"),
        ("[a]\ntokens = 3", r"\[a\] tokens is none of tokens_per_s"),
        ("[a]\ntokens_per_s = 0", "over 0"),
        ("[a]\ntokens_per_s = true", "over 0"),
        ("[a]\nconcurrent_requests = 2.5", "over 0"),
        ("[a]\nburst_tokens = 5", "no effect"),
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
    quotas.enter("a", 10.0)
    refused(quotas, "a", 12.0)
    path.write_text("[a]\nconcurrent_requests = 2\ntokens_per_s = 10\n")
    quotas.enter("a", 14.0)
    refused(quotas, "a", 16.0)
    quotas.pay("a", 120, 16.0)  # 100 was saved up
    quotas.leave("a")
    assert refused(quotas, "a", 16.1).reason == "TENANT_TOKENS"
    path.write_text("[a]\nconcurrent_requests = no\n")  # half written
    assert refused(quotas, "a", 17.2).reason == "TENANT_TOKENS" and "the old ones go on" in caplog.text
    path.write_text("[b]\nconcurrent_requests = 1\n")
    quotas.enter("a", 18.4)  # nobody bounds it any more


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_quotas(tmp_path / "nothing.toml")
