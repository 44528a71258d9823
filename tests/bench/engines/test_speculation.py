"""What bench/speculation.py says of losses: its goal is the same on every machine, and a noisy one says nothing."""

import pytest

from bench import speculation
from bench.lib.decoding import Decoded
from bench.lib.report import Report


def runs(*speeds: float) -> list[Decoded]:
    return [Decoded([], 1, 1 / speed, 1 / speed, 1.0, 0, 0) for speed in speeds]


def low_end(noise: float, speed: float) -> tuple[str, str, bool | None]:
    """Return name, goal and verdict of the row of an arm, where plain runs differ by `noise`."""
    report = Report("python bench/speculation.py", False)
    arms = {"plain": runs(*[1.0] * 9), "plain again": runs(*[1.0 + noise] * 9), "eagle": runs(*[speed] * 9)}
    speculation.low_ends(report, arms, "edit")
    row = report.rows[-1]
    return row.row, row.goal, row.met


@pytest.mark.parametrize("speed, met", [(0.97, False), (1.0, True)])
def test_a_loss_has_the_same_goal_whatever_the_noise(speed, met):
    assert low_end(0.0, speed) == ("edit: eagle over plain, low end", "value >= 0.98", met)
    assert low_end(0.02, speed)[1] == "value >= 0.98"


def test_on_a_noisy_machine_the_row_is_void():
    name, goal, met = low_end(0.06, 0.9)
    assert name.endswith("low end: VOID, two plain runs differ by 5% or more") and not goal and met is None
