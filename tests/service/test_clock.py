"""Two clocks over a network that delays each way as it likes: the offset is found within the error that is stated."""

import random

import pytest

from baton.service.clock import BEAT_INTERVAL_S, FIRST_INTERVAL_S, ClockComparison, Offset

SECOND = 1_000_000_000


def exchange(clocks: ClockComparison, at_ns: int, ahead_ns: int, there_ns: int, held_ns: int, back_ns: int) -> int:
    """One that begins at `at_ns` of our clock; returns when it is over."""
    arrived_ns = at_ns + there_ns
    received_ns = arrived_ns + held_ns + back_ns
    clocks.note(at_ns, arrived_ns + ahead_ns, arrived_ns + ahead_ns + held_ns, received_ns)
    return received_ns


@pytest.mark.parametrize("ahead_ns", [0, 250_000, -7 * SECOND, 3600 * SECOND])
def test_the_offset_is_right_within_its_error(ahead_ns):
    rng, clocks, at_ns = random.Random(ahead_ns), ClockComparison(), 1_700_000_000 * SECOND
    for _ in range(200):
        delays = [int(rng.expovariate(1 / 2e6)) + 50_000 for _ in range(3)]
        at_ns = exchange(clocks, at_ns, ahead_ns, *delays) + SECOND
        found = clocks.offset(at_ns)
        assert abs(found.offset_s - ahead_ns / 1e9) <= found.error_s + 1e-9
    assert found.error_s < 0.005


def test_the_quickest_exchange_counts():
    clocks = ClockComparison()
    end = exchange(clocks, 10 * SECOND, 5 * SECOND, 1_000_000, 0, 9_000_000)
    assert clocks.offset(end) == Offset(pytest.approx(4.996), pytest.approx(0.005))
    end = exchange(clocks, 11 * SECOND, 5 * SECOND, 100_000, 200_000_000, 100_000)
    assert clocks.offset(end) == Offset(pytest.approx(5.0), pytest.approx(0.0001))
    end = exchange(clocks, 12 * SECOND, 5 * SECOND, 30_000_000, 0, 1_000_000)
    assert clocks.offset(end).offset_s == pytest.approx(5.0)


def test_several_answers_to_one_message_are_one_exchange():
    clocks, sent_ns = ClockComparison(), 10 * SECOND
    for back_ns in (5_000_000, 1_000_000, 7_000_000):
        for _ in range(20):
            exchange(clocks, sent_ns, SECOND, 1_000_000, 0, back_ns)
    assert clocks.offset(sent_ns + 2_000_000).error_s == pytest.approx(0.001)
    for second in range(11, 18):  # seven more: the first is still known
        exchange(clocks, second * SECOND, SECOND, 20_000_000, 0, 20_000_000)
    assert clocks.offset(17 * SECOND).error_s < 0.0012
    exchange(clocks, 18 * SECOND, SECOND, 20_000_000, 0, 20_000_000)
    assert clocks.offset(18 * SECOND).error_s > 0.019


def test_an_old_exchange_says_less():
    clocks = ClockComparison()
    end = exchange(clocks, SECOND, 0, 100_000, 0, 100_000)
    assert clocks.offset(end + 100 * SECOND).error_s == pytest.approx(0.0001 + 0.0015)


def test_a_clock_that_jumped_is_not_believed():
    clocks = ClockComparison()
    clocks.note(10 * SECOND, 10 * SECOND, 11 * SECOND, 10 * SECOND + 5)  # held for longer than all of it took
    assert clocks.offset(11 * SECOND) is None


def test_stamps_are_put_right_only_where_the_clocks_are_two():
    assert Offset(0.0001, 0.0002).correction_s == 0.0
    assert Offset(-3.0, 0.0002).correction_s == -3.0


def test_a_beat_is_due_once_in_an_interval():
    clocks = ClockComparison()
    assert clocks.is_due(5.0) and not clocks.is_due(5.0 + FIRST_INTERVAL_S / 2)
    assert clocks.is_due(5.001 + FIRST_INTERVAL_S)
    for second in range(8):
        exchange(clocks, second * SECOND, 0, 1000, 0, 1000)
    assert not clocks.is_due(5.0 + BEAT_INTERVAL_S) and clocks.is_due(5.2 + BEAT_INTERVAL_S)
