"""Values that gateway and worker put into messages alike."""

import time

import pytest

from baton.service import codec


def test_key_both_ways():
    assert codec.key_from_proto(codec.key_to_proto(("a", 3))) == ("a", 3)


def test_budget_is_a_duration():
    assert codec.budget_ms(time.monotonic() - 1) == 0
    assert 9_000 < codec.budget_ms(time.monotonic() + 10) <= 10_000
    assert codec.budget_ms(float("inf")) == (1 << 32) - 1
    assert codec.deadline_of(5000) == pytest.approx(time.monotonic() + 5, abs=2)
