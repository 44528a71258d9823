"""What steps and drafts take, told from measurements that are disturbed now and then."""

import random

import pytest

from baton.engine.speculation.control.costs import CostCurve, RunningMedian


def test_a_small_size_that_was_dear_once_is_not_believed_against_larger_ones():
    curve = CostCurve()
    for _ in range(3):
        curve.add(1, 3.0)
    for _ in range(300):
        curve.add(8, 0.3)
    assert curve.at(1) <= curve.at(8) < 0.36


def test_disturbed_steps_change_little():
    chance, plain, curve = random.Random(0), RunningMedian(), CostCurve()
    for index in range(200):
        disturbed = 5.0 if chance.random() < 0.15 else 1.0
        plain.add(disturbed)
        curve.add(1 + index % 8, (0.5 + 0.25 * (1 + index % 8)) * disturbed)
    assert plain.value == 1.0
    assert curve.at(4) == pytest.approx(1.5, rel=0.1)


def test_tiles_of_rows_are_found():
    curve = CostCurve()
    assert not curve.is_known
    for index in range(200):
        size = 1 + index % 40
        curve.add(size, 0.25 * -(-(1 + size) // 4))
    assert curve.is_known
    tiles = [0.25 * -(-(1 + size) // 4) for size in range(1, 16)]
    assert [curve.at(size) for size in range(1, 16)] == pytest.approx(tiles)
    assert curve.at(64) == pytest.approx(4.1, rel=0.1)
    curve = CostCurve()
    for _ in range(5):
        curve.add(2, 1.0), curve.add(4, 2.0)
    assert [curve.at(size) for size in (2, 3, 4, 8)] == [1.0, 1.5, 2.0, 4.0]
