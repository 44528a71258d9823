import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.latency_model import Fit, Pace, PaceEstimator, RecentLoad


def test_nothing_is_known_at_first():
    assert PaceEstimator().pace(0.0) == PaceEstimator(PaceEstimator()).pace(0.0) == Pace()


def test_a_line_is_found_through_noise():
    rng, estimator = random.Random(0), PaceEstimator()
    for i in range(200):
        num_tokens, num_beside = rng.randrange(200, 4000), rng.randrange(1, 33)
        estimator.note_prefill(num_tokens, (0.02 + num_tokens / 8000) * rng.uniform(0.9, 1.1), i / 10)
        estimator.note_decode(num_beside, (0.01 + 0.001 * num_beside) * rng.uniform(0.9, 1.1), i / 10)
        estimator.note_transfer(1000 * num_tokens, 0.004 + 1000 * num_tokens / 2e9, i / 10)
    pace = estimator.pace(20.0)
    assert pace.prefill_s(2000) == pytest.approx(0.27, rel=0.05) and 1 / pace.prefill_token_s == pytest.approx(
        8000, rel=0.15
    )
    assert pace.tpot_s(16) == pytest.approx(0.026, rel=0.05) and pace.decode_sequence_s == pytest.approx(0.001, rel=0.2)
    assert 1 / pace.transfer_byte_s == pytest.approx(2e9, rel=0.2)


def test_samples_that_are_all_alike_say_a_rate():
    estimator = PaceEstimator()
    for i in range(10):
        estimator.note_prefill(1000, 0.205, i)
    assert estimator.pace(10.0).prefill_s(1000) == pytest.approx(0.205)
    assert estimator.pace(10.0).prefill_token_s == pytest.approx(0.2 / 1000)


def test_old_samples_give_way():
    estimator = PaceEstimator()
    for i in range(100):
        estimator.note_prefill(1000, 0.1, i)
    for i in range(100, 250):
        estimator.note_prefill(1000, 0.4, i)
    assert estimator.pace(250.0).prefill_s(1000) == pytest.approx(0.4, rel=0.05)


def test_one_stall_is_no_slow_worker():
    estimator = PaceEstimator()
    for i in range(20):
        estimator.note_prefill(1000, 0.1, i)
    estimator.note_prefill(1000, 60.0, 20)
    assert estimator.pace(20.0).prefill_s(1000) < 0.15


def test_what_a_worker_has_not_shown_the_fleet_has():
    fleet = PaceEstimator()
    old, new = PaceEstimator(fleet), PaceEstimator(fleet)
    for i in range(20):
        old.note_prefill(1000, 0.8, i)
    assert new.pace(20.0) == fleet.pace(20.0) and new.pace(20.0).prefill_s(1000) == pytest.approx(0.8)
    for i in range(20):
        new.note_prefill(1000, 0.1, 21.0 + i)
        old.note_prefill(1000, 0.8, 21.0 + i)
    assert new.pace(41.0).prefill_s(1000) < 0.3 < 0.6 < old.pace(41.0).prefill_s(1000)
    assert new.pace(10_000.0).prefill_s(1000) == pytest.approx(fleet.pace(10_000.0).prefill_s(1000))


def test_chance_makes_no_worker_slow():
    """Two hundred equal workers, measured five times each: none appears to take half or twice as long."""
    rng, fleet = random.Random(0), PaceEstimator()
    workers = [PaceEstimator(fleet) for _ in range(200)]
    for i in range(1000):
        num_beside = rng.randrange(1, 9)
        workers[i % 200].note_decode(num_beside, (0.01 + 0.001 * num_beside) * rng.uniform(0.7, 1.3), i / 50)
    looks = [worker.pace(20.0).tpot_s(4) / fleet.pace(20.0).tpot_s(4) for worker in workers]
    assert min(looks) > 0.9 and max(looks) < 1.1


def test_a_slow_worker_is_told_from_the_others():
    fleet = PaceEstimator()
    workers = [PaceEstimator(fleet) for _ in range(10)]
    for i in range(300):
        workers[i % 10].note_decode(1 + i % 7, (0.1 if i % 10 == 0 else 0.01) * (1 + i % 7), i / 30)
    slow, *others = (worker.pace(10.0).tpot_s(4) for worker in workers)
    assert slow > 3 * max(others)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_what_is_no_duration_is_not_noted(seconds):
    estimator = PaceEstimator()
    estimator.note_prefill(1000, seconds, 0.0)
    estimator.note_decode(4, seconds, 0.0)
    estimator.note_transfer(1000, seconds, 0.0)
    assert estimator.pace(0.0) == Pace()


def test_a_short_prompt_says_nothing_of_the_rate():
    estimator = PaceEstimator()
    estimator.note_prefill(10, 5.0, 0.0)
    assert estimator.pace(0.0) == Pace()


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-6, 100), st.floats(0, 1000)), min_size=1, max_size=40))
def test_a_fit_is_never_negative_and_grows(samples):
    fit = Fit(0.005, 1e-4)
    for x, y, at in samples:
        fit.add(x, y, at)
    assert fit.base >= -1e-9 and fit.slope >= 0 and math.isfinite(fit.base + fit.slope)


def test_recent_work():
    recent_load = RecentLoad()
    for i in range(600):
        recent_load.add(0.05, i / 10)  # half of the time
    assert recent_load.utilization(60.0) == pytest.approx(0.4, abs=0.15)
    assert recent_load.utilization(600.0) < 0.01
