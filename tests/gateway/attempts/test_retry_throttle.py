"""Retries of all requests together: paid for, and saved up by requests; prompts that workers die of, for a minute."""

import pytest

from baton.service.errors import BatonError
from gateway.attempts import retry_throttle
from gateway.attempts.retry_throttle import RetryThrottle, prompt_digest
from tests.gateway.calls import PROMPT, ids_of, spend_retries, start
from tests.support.gateway.fake_worker import tokens_of


def test_each_request_saves_a_tenth_of_a_retry():
    throttle = RetryThrottle()
    for _ in range(50):
        throttle.begin(b"a prompt")
    assert spend_retries(throttle) == 100, "that is the most"
    for _ in range(25):
        throttle.begin(b"a prompt")
    assert spend_retries(throttle) == 2 and throttle.num_refused == 2


def test_poison_of_one_tenant_is_refused_to_it_alone_and_for_a_minute(monkeypatch):
    at = [1000.0]
    monkeypatch.setattr(retry_throttle, "now", lambda: at[0])
    throttle, digest = RetryThrottle(), prompt_digest("acme", PROMPT)
    throttle.quarantine(digest)
    for seconds in (0.0, 59.0):
        at[0] = 1000.0 + seconds
        with pytest.raises(BatonError, match="died of this prompt"):
            throttle.begin(digest)
    throttle.begin(prompt_digest("bravo", PROMPT))
    at[0] = 1060.0
    throttle.begin(digest)


@pytest.mark.parametrize("num_lost, num_paid", [(1, 0), (2, 1)])
async def test_the_first_lost_worker_costs_no_retry_others_do(cluster, num_lost, num_paid):
    async with cluster(num_prefill=3) as c:
        failures = [(14, "DRAINING")] * num_lost  # whichever of them has the request
        for worker in c.prefill:
            worker.failures["prefill"] = failures
        assert ids_of(await start(c)) == tokens_of(PROMPT, 6, 400)
        assert spend_retries(c.pipeline.retry_throttle) == 100 - num_paid
