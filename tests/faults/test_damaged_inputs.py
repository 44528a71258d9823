"""H8 and its neighbours: nothing that can be sent brings anything down. More: python -m tests.faults.gather fuzz."""

import pytest

from tests.faults import damaged_inputs


@pytest.mark.parametrize("count", [5_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_inputs_that_nobody_should_send(count):
    found = damaged_inputs.run(count, seed=count)
    assert found["fuzz_inputs"] == count and not found["fuzz_crashes"], found


NOISE = (
    damaged_inputs.a_frame,
    damaged_inputs.a_value_of_redis,
    damaged_inputs.what_a_gateway_told,
    damaged_inputs.a_member_of_the_roster,
)
WELL = [target for target in damaged_inputs._TARGETS if target not in NOISE]


@pytest.mark.parametrize("target", WELL, ids=lambda target: target.__name__)
def test_what_is_well_is_let_through(target, monkeypatch):
    """Otherwise the rest would prove nothing: undamaged, each of them is taken."""
    monkeypatch.setattr(damaged_inputs, "_damaged", lambda draw, message: message)
    monkeypatch.setattr(damaged_inputs, "_damaged_bytes", lambda draw, well: well)
    target(None)
