"""Say whether a worker serves, compiles, is stalled, or has to end."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from baton.engine.kernels.compiling import CompileWatch
from baton.worker.observe import reports
from baton.worker.observe.reports import COMPILED_WITHIN_S, HUNG_AFTER, STALLED_AFTER_S, Reports


class ReportsHarness:
    """A worker that has work and has not stepped for a while, as its reports see it."""

    def __init__(self, silent_s: float, device: str = "cuda", compiling_s: float | None = None):
        now = time.monotonic()
        watch = CompileWatch()
        watch.since = None if compiling_s is None else now - compiling_s
        engine = SimpleNamespace(
            has_work=lambda: True, step_number=3, pool=SimpleNamespace(device=torch.device(device)),
            runner=SimpleNamespace(launcher=SimpleNamespace(compiling=watch)),
        )  # fmt: skip
        self.engine, self.loop = engine, SimpleNamespace(last_beat=now - silent_s, is_alive=True)
        dispatcher = SimpleNamespace(is_draining=False, legs={})
        self.health: dict[str, bool] = {}
        health = SimpleNamespace(set=self.health.__setitem__)
        self.reports = Reports(engine, self.loop, dispatcher, None, health, None, None)


@pytest.fixture
def left(monkeypatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(reports, "exit_for_hung_device", seconds.append)
    return seconds


@pytest.mark.parametrize(
    "silent_s, compiling_s, state",
    [
        (0.0, None, "serving"),
        (STALLED_AFTER_S + 1, None, "stalled"),
        (STALLED_AFTER_S + 1, STALLED_AFTER_S, "compiling"),
        (COMPILED_WITHIN_S + 2, COMPILED_WITHIN_S + 1, "stalled"),
    ],
)
def test_a_worker_that_compiles_is_not_stalled(silent_s, compiling_s, state):
    harness = ReportsHarness(silent_s, compiling_s=compiling_s)
    assert harness.reports.state == state
    harness.reports._set_health()
    assert set(harness.health.values()) == {state != "stalled"}


def test_a_worker_whose_loop_has_died_is_stalled_though_nothing_is_asked_of_it():
    harness = ReportsHarness(0.0)
    harness.engine.has_work = lambda: False
    harness.loop.is_alive = False
    assert harness.reports.state == "stalled"
    harness.reports._set_health()
    assert harness.health and not any(harness.health.values())


def test_a_ledger_that_does_not_add_up_is_told_of_when_the_engine_is_idle(monkeypatch, caplog):
    """Once for each time that something has run."""

    def fail():
        raise AssertionError("3 blocks of nobody")

    monkeypatch.setattr(reports, "INTEGRITY_INTERVAL_S", 0.0)
    caplog.set_level(logging.ERROR)
    harness = ReportsHarness(0.0)
    harness.engine.check_integrity = fail
    harness.reports._check_integrity()
    assert not caplog.records, "it has work"
    harness.engine.has_work = lambda: False
    for step_number, num_told in ((3, 1), (3, 1), (4, 2)):
        harness.engine.step_number = step_number
        harness.reports._check_integrity()
        assert len(caplog.records) == num_told
    assert "LEDGER BROKEN" in caplog.text and "3 blocks of nobody" in caplog.text


@pytest.mark.parametrize(
    "device, silent_s, compiling_s, ends",
    [
        ("cuda", HUNG_AFTER * STALLED_AFTER_S + 1, None, True),
        ("cuda", STALLED_AFTER_S + 1, None, False),
        ("cuda", HUNG_AFTER * STALLED_AFTER_S + 1, 10.0, False),
        ("cpu", HUNG_AFTER * STALLED_AFTER_S + 1, None, False),
    ],
)
def test_a_gpu_that_hangs_ends_its_worker(left, device, silent_s, compiling_s, ends):
    ReportsHarness(silent_s, device, compiling_s).reports.exit_if_hung()
    assert bool(left) == ends
