"""A rank that gives no sign of life is lost, later where it waits for a core."""

import os
import sys

import pytest

from baton import system
from baton.engine.ranks import spawn
from baton.engine.ranks.spawn import Ranks


class Silent:
    """A rank, and the group that it is in: it runs, and never says so. `share` of its time it waits for a core."""

    still, where, missed_beats = "stands still", "here", 15

    def __init__(self, share: float):
        self._share, self.num_looks, self.is_killed = share, 0, False

    def beat_of(self, rank: int) -> int:
        self.num_looks += 1
        return 0

    def core_wait_s(self) -> float:
        return self.num_looks * spawn.BEAT_S * self._share

    def ended(self) -> str:
        return ""

    def kill(self) -> None:
        self.is_killed = True

    def lose(self) -> None:
        pass


@pytest.mark.parametrize("share, num_beats", [(0.0, Silent.missed_beats), (0.9, spawn.MISSED_BEATS_OF_BUSY_HOST)])
def test_one_that_waits_for_a_core_is_waited_for(monkeypatch, share, num_beats):
    monkeypatch.setattr(spawn, "BEAT_S", 0.001)
    rank, reasons = Silent(share), []
    ranks = Ranks(rank, [rank])
    ranks.when_lost(reasons.append)
    ranks._watcher.start()
    ranks._watcher.join()
    assert rank.is_killed and rank.num_looks == num_beats + 1  # the first tells where it stands
    assert reasons[0].startswith("rank 1 (here) stands still for ")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")
def test_the_waits_of_a_process_are_those_of_all_its_threads():
    by_thread = system.run_and_wait_ns(pid=os.getpid())
    assert by_thread.keys() == system.run_and_wait_ns().keys() and not system.run_and_wait_ns(pid=2**30)
