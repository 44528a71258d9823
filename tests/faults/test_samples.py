"""The gates of the marathon: what grows is found, what only moves is not, and nothing is judged before its time."""

import json
import os
import random
from types import SimpleNamespace

import pytest

from tests.support.faults.samples import WARM_S, Samples

HOUR_S = 3600.0


def seen(name: str, value_at, hours: float = 2.0, every_s: float = 5.0) -> Samples:
    """A number that was looked at for so long."""
    samples, steps = Samples(), round(hours * HOUR_S / every_s)
    samples.add_all(name, [(step * every_s, value_at(step * every_s)) for step in range(steps)])
    return samples


@pytest.mark.parametrize("name", ["gateway0 1 rss MiB", "gateway0 1 descriptors", "gateway0 1 tasks", "redis keys"])
def test_a_leak_is_found(name):
    """1.5 an hour of memory, 100 an hour of anything else, below noise of three times as much."""
    rate = 1.5 if name.endswith("MiB") else 100.0
    draw = random.Random(5)
    samples = seen(name, lambda at: 200 + rate * at / HOUR_S + draw.uniform(-3, 3))
    (fault,) = samples.missed_gates()
    assert fault.startswith(f"{name} grows by ")


@pytest.mark.parametrize("name", ["gateway0 1 rss MiB", "gateway0 1 threads", "gateway0 1 tasks", "redis keys"])
def test_what_moves_and_does_not_grow(name):
    """It grows while it is warm-up, and comes and goes with bursts every eight minutes."""
    draw = random.Random(6)
    samples = seen(name, lambda at: 200 - 50 * max(0, 1 - at / WARM_S) + (20 if at % 480 > 420 else 0) + draw.random())
    assert samples.missed_gates() == []


def test_growth_to_a_bound_is_told_from_a_leak():
    """By the last half of the time: a leak has the same slope there."""
    name, minute = "gateway0 1 rss MiB", 60.0
    bound = seen(name, lambda at: 200 + 4 * min(1.0, at / (60 * minute)))
    leak = seen(name, lambda at: 200 + 4 * at / HOUR_S)
    assert bound.slopes()[name] > 1.0 and bound.slopes(last=0.5)[name] == pytest.approx(0, abs=0.4)
    assert [leak.slopes(last=last)[name] for last in (1.0, 0.5)] == pytest.approx([4, 4])
    assert bound.missed_gates() == [] and leak.missed_gates() == [f"{name} grows by 4.00 an hour, at most 1.00"]


def test_ten_minutes_unlike_the_others_are_not_growth():
    """Not of all of the time either: by least squares they would be 32 an hour."""
    samples = seen("gateway0 1 tasks", lambda at: 100 if WARM_S <= at < WARM_S + 600 else 200)
    assert samples.slopes()["gateway0 1 tasks"] == pytest.approx(0, abs=0.1)


def test_what_has_a_bound_is_judged_by_it():
    """Whatever its slope is."""
    samples = Samples({"redis keys": 640})
    samples.add_all("redis keys", [(step * 5.0, step) for step in range(641)])
    assert samples.missed_gates() == []
    samples.add_all("redis keys", [(641 * 5.0, 641)])
    assert samples.missed_gates() == ["redis keys were 641, at most 640"]


def test_a_short_life_is_not_judged():
    samples = seen("decode1 7 rss MiB", lambda at: at, hours=0.6)
    assert samples.slopes() == {} and samples.missed_gates() == []


def test_what_a_process_takes(tmp_path):
    """Sample this process; one that is gone is left out."""
    samples = Samples()
    for _ in range(3):
        samples.take([SimpleNamespace(name="here", pid=os.getpid()), SimpleNamespace(name="gone", pid=1 << 22)], keys=4)
    slopes = samples.slopes(warm_s=0.0)
    assert set(slopes) == {f"here {os.getpid()} {name}" for name in ("rss MiB", "threads", "descriptors")} | {"keys"}
    assert slopes["keys"] == 0.0
    samples.save(tmp_path / "samples.json")
    assert [value for _, value in json.loads((tmp_path / "samples.json").read_text())["keys"]] == [4, 4, 4]
