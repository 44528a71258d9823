"""The busy share of the cores that a process may use, and the advice that knows it."""

import os

import pytest

from baton import system
from baton.service.observe import cpu_usage
from baton.service.observe.bottleneck import Bottleneck, aware_of_host
from baton.service.observe.cpu_usage import CpuUsage

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def stat(tmp_path, monkeypatch):
    """Write what the kernel would tell: the same ticks of each core, and of one that this process may not use."""
    path, at = tmp_path / "stat", [100.0]
    monkeypatch.setattr(cpu_usage, "_STAT", path)
    monkeypatch.setattr(cpu_usage.time, "monotonic", lambda: at[0])

    def write(after_s: float, *ticks: int) -> None:
        at[0] += after_s
        row = " ".join(map(str, ticks))
        lines = [f"cpu {row}", *(f"cpu{core} {row}" for core in CORES), f"cpu{max(CORES) + 1} 0 0 0 9999999 0 0 0 0"]
        path.write_text("\n".join([*lines, "intr 1"]))

    return write


def test_the_share_between_two_looks(stat):
    stat(0, 100, 0, 0, 100, 0, 0, 0, 0, 0, 0)
    usage = CpuUsage()
    stat(2, 250, 0, 20, 110, 20, 0, 0, 0, 0, 0)  # 170 busy, 30 idle or waiting for a disk
    assert usage.busy() == pytest.approx(0.85)
    stat(0.5, 260, 0, 20, 900, 20, 0, 0, 0, 0, 0)
    assert usage.busy() == pytest.approx(0.85), "too soon to tell"
    stat(2, 250, 0, 20, 910, 20, 0, 0, 0, 0, 0)
    assert usage.busy() == pytest.approx(0.0)


def test_a_quota_that_is_used_up_is_busy_whatever_the_host_is(stat, monkeypatch):
    """Its cores are those that count, and another worker would share them."""
    periods = [(10, 100)]
    monkeypatch.setattr(system, "num_cores", lambda: 1)
    monkeypatch.setattr(system, "throttled_periods", lambda: periods[-1])
    stat(0, 100, 0, 0, 100, 0, 0, 0, 0, 0, 0)
    usage = CpuUsage()
    assert usage.num_cores == 1
    stat(2, 150, 0, 0, 150, 0, 0, 0, 0, 0, 0)
    periods.append((29, 120))
    assert usage.busy() == pytest.approx(0.95)
    stat(2, 210, 0, 0, 190, 0, 0, 0, 0, 0, 0)
    periods.append((29, 140))
    assert usage.busy() == pytest.approx(0.6)


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_usage, "_STAT", tmp_path / "none")
    monkeypatch.setattr(cpu_usage, "_LEAST_S", 0.0)
    assert CpuUsage().busy() == 0.0


def test_another_worker_is_no_advice_for_a_full_host():
    bottleneck = Bottleneck("prefill compute", "Try this: add prefill workers.")
    assert aware_of_host(bottleneck, 2, 0.5) == bottleneck
    told = aware_of_host(bottleneck, 2, 0.97)
    assert told.name == bottleneck.name and told.sentence.startswith(bottleneck.sentence)
    assert (
        "Another worker needs another host, or a higher CPU limit: the 2 cores that may be used here are 97% busy."
        in told.sentence
    )
    slow_network = Bottleneck("transfer", "Try this: move the workers to one host.")
    assert aware_of_host(slow_network, 2, 1.0) == slow_network
