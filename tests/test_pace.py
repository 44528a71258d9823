"""Time limits of tests are as long as the machine is slow, never shorter than they are written."""

import pytest

from tests.support import pace


@pytest.mark.parametrize("measured_s, factor", [(0.01, 1.0), (0.05, 1.0), (0.1, 2.0), (0.5, 10.0), (60.0, 20.0)])
def test_a_slow_machine_is_waited_for(measured_s, factor):
    assert pace.of(measured_s) == pytest.approx(factor)


def test_it_is_measured_once(monkeypatch):
    taken = iter([0.1, 0.15, 9.0])
    monkeypatch.delenv(pace.VARIABLE, raising=False)
    monkeypatch.setattr(pace, "_once", lambda: next(taken))
    assert pace.patience(10.0) == pytest.approx(30.0) and pace.slowness() == pytest.approx(3.0)


def test_a_test_may_take_as_much_longer(request):
    (limit,) = request.node.get_closest_marker("timeout").args
    assert limit == pytest.approx(float(request.config.getini("timeout")) * pace.slowness())


@pytest.mark.timeout(50)
def test_so_does_one_with_a_limit_of_its_own(request):
    assert request.node.get_closest_marker("timeout").args[0] == pytest.approx(50 * pace.slowness())
