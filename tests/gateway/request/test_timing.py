"""The phases of a request, from its stamps and from what its workers measured."""

import pytest

from baton.v1 import worker_pb2 as pb
from gateway.request.timing import Measured, Stamps, timing

STAMPS = Stamps(
    received=10.0,
    tokenized=10.1,
    routed=10.3,
    granted=10.6,
    prefill_sent=10.7,
    first_sent=12.0,
    second_sent=13.0,
    last_sent=14.0,
)


def test_phases_add_up():
    decode = pb.DecodeReport(kv_wait_s=0.2, decode_queue_s=0.1, first_step_s=0.3)
    result = timing(STAMPS, Measured(0.2, 0.5, 0.4, 0.1, decode), 11)
    phases = (result.tokenize_s, result.route_s, result.admit_s, result.prefill_queue_s, result.prefill_s)
    assert phases == pytest.approx((0.1, 0.2, 0.3, 0.3, 0.5))
    assert sum(phases) + result.first_delivery_s == pytest.approx(result.ttft_s) == pytest.approx(2.0)
    second = (result.kv_wait_s, result.decode_queue_s, result.first_step_s, result.second_delivery_s)
    assert second == pytest.approx((0.2, 0.1, 0.3, 0.4))
    assert result.total_s == pytest.approx(4.0) and result.tpot_s == pytest.approx(0.2)
    assert (result.transfer_s, result.transfer_hidden_s) == pytest.approx((0.4, 0.3))


def test_a_worker_s_clock_may_run_fast():
    """A measured time is cut to the gap that bounds it: no phase is negative, and the sum is right."""
    decode = pb.DecodeReport(kv_wait_s=5.0, decode_queue_s=5.0, first_step_s=-1.0)
    result = timing(STAMPS, Measured(100.0, 100.0, 0.1, 9.0, decode), 2)
    assert (result.prefill_queue_s, result.prefill_s, result.first_delivery_s) == pytest.approx((1.4, 0, 0))
    assert (result.kv_wait_s, result.decode_queue_s, result.first_step_s, result.second_delivery_s) == (1.0, 0, 0, 0)
    assert result.transfer_hidden_s == 0


def test_an_answer_of_one_token_has_no_time_per_token():
    result = timing(Stamps(1.0, 1.1, 1.2, 1.3, 1.3, first_sent=2.0, last_sent=2.0), Measured(), 1)
    assert result.ttft_s == pytest.approx(1.0) and result.tpot_s == result.second_delivery_s == 0
