"""Count the work of steps from their slices, over whole seconds."""

from types import SimpleNamespace

import pytest

from baton.engine import step_work
from baton.engine.schedule.steps import Slice
from baton.engine.step_work import WINDOW_S, StepWork, WorkRates


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.5)
    monkeypatch.setattr(step_work.time, "monotonic", lambda: clock.now)
    return clock


def piece(begin: int, end: int, num_drafts: int = 0) -> Slice:
    return Slice(SimpleNamespace(draft_ids=[7] * num_drafts), begin, end)


def test_a_chunk_and_a_decoding_sequence(clock):
    counted = StepWork()
    counted.add([piece(0, 4), piece(9, 10)])
    assert counted.rates() == WorkRates(), "the second is not over"
    clock.now += 1
    # Tokens 0 to 3 see 1 + 2 + 3 + 4 positions, token 9 sees 10.
    assert [rate * WINDOW_S for rate in counted.rates()] == pytest.approx([1, 5, 2, 20, 4 + 4 + 10 + 1])


def test_proposals_are_computed_too(clock):
    counted = StepWork()
    counted.add([piece(9, 10, num_drafts=2)])
    clock.now += 1
    assert [rate * WINDOW_S for rate in counted.rates()] == pytest.approx([1, 3, 1, 10 + 11 + 12, 12 + 3])


def test_the_window_moves_and_what_is_held_is_bounded(clock):
    counted = StepWork()
    for _ in range(50):
        counted.add([piece(0, 10)])
        clock.now += 1
    assert counted.rates().tokens == pytest.approx(10) and len(counted._seconds) == WINDOW_S + 1
    clock.now += 2 * WINDOW_S
    assert counted.rates() == WorkRates()
