"""The scaler's decisions: up in time, down only where the survivors hold, still at a boundary, deaf to what is no
number."""

import math
import random

import pytest

from baton.loadgen.trace import TraceEntry
from baton.planning.scaling.counters import NAN, FleetCounters
from baton.planning.scaling.day import generated_day, minutes_of, needed_workers, run_day
from baton.planning.scaling.scaler import DECIDE_S, MOST_BUSY, ScaleChange, ScaleDecision, Scaler, ScalerBounds
from baton.service.slo import Slo
from tests.planning.scaling.flat_model import FlatModel

BOUNDS = ScalerBounds(least={"prefill": 1, "decode": 1}, most={"prefill": 200, "decode": 200}, most_together=400)


class Fleet:
    """Workers that are there at once, and a scaler that is asked each minute."""

    def __init__(self, bounds=BOUNDS, start_s=60.0, slo=Slo(ttft_s=1.0), **serving):
        self.scaler, self.at_s = Scaler(FlatModel(), bounds, slo, start_s), 0.0
        self.serving = {"prefill": 1, "decode": 1, **serving}
        self.starting = {"prefill": 0, "decode": 0}

    def ask(self, rate, prompt=2000.0, output=100.0, **counters) -> ScaleDecision | None:
        self.at_s += DECIDE_S
        seen = FleetCounters(
            self.at_s, rate, prompt, output, serving=dict(self.serving), starting=dict(self.starting), **counters
        )
        return self.scaler.decide(seen)

    def follow(self, rate, minutes=1, **counters) -> list[dict[str, int]]:
        found = []
        for _ in range(minutes):
            decision = self.ask(rate, **counters)
            if decision is not None:
                self.serving = dict(decision.wanted)
            found.append(dict(self.serving))
        return found


def test_as_many_as_hold_the_load():
    fleet = Fleet()
    assert fleet.follow(20)[-1] == {"prefill": 3, "decode": 2}  # 2.0 and 0.8 workers' work


def test_workers_that_start_count():
    fleet = Fleet()
    fleet.starting = {"prefill": 2, "decode": 1}
    decision = fleet.ask(20)
    assert decision.changes(fleet.serving, fleet.starting) == []


def test_up_before_the_load_is_there():
    """It rises by half a worker's work a minute: those that are asked for now serve when it has."""
    fleet, rate = Fleet(start_s=180.0), 10.0
    for _ in range(15):
        rate += 5
        (have,) = fleet.follow(rate)
    assert have["prefill"] * MOST_BUSY >= (rate + 3 * 5) * 0.1


def test_down_only_where_survivors_hold_the_most_of_the_last_minutes():
    fleet = Fleet()
    fleet.follow(80, minutes=20)
    high = fleet.serving["prefill"]
    numbers = [have["prefill"] for have in fleet.follow(30, minutes=30)]
    assert numbers[:10] == [high] * 10, "a quarter of an hour ago it was needed"
    assert numbers[-1] < high and numbers[-1] * MOST_BUSY > 3.0
    assert numbers == sorted(numbers, reverse=True)


def test_none_goes_while_a_gateway_is_silent():
    fleet = Fleet(decode=4)
    fleet.follow(1, minutes=20, num_silent=1)
    assert fleet.serving["decode"] == 4
    assert fleet.follow(1)[-1]["decode"] == 1


def test_none_goes_in_the_first_quarter_of_an_hour():
    """A scaler that starts in a lull does not know what came before."""
    fleet = Fleet(decode=4)
    decodes = [each["decode"] for each in fleet.follow(1, minutes=17)]
    assert decodes[:15] == [4] * 15 and decodes[16] == 1


def test_none_goes_soon_after_one_was_added():
    fleet = Fleet()
    fleet.follow(5, minutes=30)
    added = fleet.follow(40)[-1]["prefill"]
    assert all(have["prefill"] == added for have in fleet.follow(5, minutes=9))


@pytest.mark.parametrize("seed", range(3))
def test_a_load_at_a_boundary_moves_nothing(seed):
    """One worker holds 0.768 workers' work before another is asked for: noise around that turned 2 <-> 1 in others."""
    rng, fleet = random.Random(seed), Fleet()
    numbers = [fleet.follow(7.68 * rng.uniform(0.93, 1.07))[-1]["prefill"] for _ in range(240)]
    turns = sum(before != after for before, after in zip(numbers, numbers[1:]))
    assert turns <= 1, numbers


def test_to_the_minimum_without_load():
    fleet = Fleet(prefill=9, decode=9)
    assert fleet.follow(0, prompt=NAN, output=NAN, minutes=30)[-1] == {"prefill": 1, "decode": 1}


def test_those_that_stay_are_those_that_the_bounds_keep():
    fleet = Fleet(decode=3)
    fleet.follow(0, minutes=15)
    decision = fleet.ask(0)
    assert decision is not None and decision.wanted == {"prefill": 1, "decode": 1}
    assert "the 1 that stays holds 0.70" in decision.reasons["decode"], decision.reasons


def test_a_load_after_none_is_known_at_once():
    fleet = Fleet()
    fleet.follow(0, prompt=NAN, output=NAN, minutes=5)
    assert fleet.ask(20, prompt=NAN, output=NAN) is None, "nothing is known of its length yet"
    assert fleet.follow(20)[-1]["prefill"] >= 3


def test_to_the_minimum_though_nobody_is_there_to_answer():
    """What answers alone tell would never be known."""
    bounds = ScalerBounds({"prefill": 1, "decode": 2}, {"prefill": 20, "decode": 20})
    fleet = Fleet(bounds, prefill=0, decode=0)
    fleet.starting["decode"] = 1
    decision = fleet.ask(5, prompt=NAN, output=NAN)
    assert decision is not None
    assert [each.words for each in decision.changes(fleet.serving, fleet.starting)] == [
        "start 1 prefill",
        "start 1 decode",
    ]
    fleet.serving, fleet.starting = {"prefill": 0, "decode": 3}, {"prefill": 1, "decode": 0}
    assert fleet.ask(5, prompt=NAN, output=NAN) is None
    fleet.serving = {"prefill": 30, "decode": 30}
    assert fleet.ask(5, prompt=NAN, output=NAN, num_silent=1) is None, "none goes of whose load nothing is known"
    fleet.serving["decode"] = 0
    decision = fleet.ask(5, prompt=NAN, output=NAN)
    assert decision is not None and decision.wanted == {"prefill": 31, "decode": 2}
    assert fleet.ask(NAN) is None, "a fleet that says nothing may be one that is cut off"


@pytest.mark.parametrize("value", [NAN, math.inf, -1.0])
def test_what_is_no_number_decides_nothing(value):
    fleet = Fleet()
    fleet.follow(20, minutes=15)
    assert fleet.ask(value) is None
    before = dict(fleet.serving)
    for name in ("read_ratio", "write_ratio", "ttft_p95_s", "tpot_p95_s", "num_waiting"):
        assert fleet.follow(20, **{name: value})[-1] == before
    assert fleet.follow(20, prompt=value, output=value)[-1] == before


def test_nan_never_blocks_the_way_down():
    fleet = Fleet()
    fleet.follow(80, minutes=5)
    lost = dict(read_ratio=NAN, write_ratio=NAN, ttft_p95_s=NAN, tpot_p95_s=NAN, num_waiting=NAN)
    assert fleet.follow(10, minutes=40, **lost)[-1]["prefill"] == 2


# ---- what the fleet showed ----


def test_a_fleet_that_is_slower_than_the_model_gets_more():
    fleet = Fleet()
    even = fleet.follow(80, minutes=10)[-1]["decode"]
    slow = fleet.follow(80, minutes=20, write_ratio=2.5)[-1]["decode"]
    assert slow >= 2 * even


def test_what_workers_show_while_others_start_is_not_believed():
    fleet = Fleet()
    fleet.follow(20, minutes=10)
    fleet.starting = {"prefill": 0, "decode": 1}
    before = fleet.ask(20).wanted["prefill"]
    for _ in range(10):
        decision = fleet.ask(20, read_ratio=3.0)
    assert decision.wanted["prefill"] == before


def test_a_queue_adds_one_at_a_time():
    fleet = Fleet(start_s=180.0)
    fleet.follow(20, minutes=10)
    before = fleet.serving["prefill"]
    numbers = [have["prefill"] for have in fleet.follow(20, minutes=4, num_waiting=50, ttft_p95_s=9.0)]
    assert numbers == [before + 1] * 4


def test_a_first_token_that_no_worker_mends_adds_none_without_end():
    fleet = Fleet()
    fleet.follow(20, minutes=10)
    numbers = [have["prefill"] for have in fleet.follow(20, minutes=120, num_waiting=3, ttft_p95_s=9.0)]
    assert numbers[-1] <= 6 and numbers[-1] == numbers[60], "it is not busy any more"


def test_what_a_queue_asked_for_is_given_back():
    fleet = Fleet()
    fleet.follow(20, minutes=10)
    before = dict(fleet.serving)
    fleet.follow(20, minutes=5, num_waiting=50, ttft_p95_s=9.0)
    assert fleet.follow(20, minutes=60)[-1] == before


def test_tokens_that_come_too_slowly_add_a_decode_worker():
    fleet = Fleet(slo=Slo(ttft_s=1.0, tpot_s=0.05))
    fleet.follow(80, minutes=10)
    before = dict(fleet.serving)
    assert fleet.follow(80, tpot_p95_s=0.06)[-1] == {**before, "decode": before["decode"] + 1}


def test_a_worker_that_slow_tokens_asked_for_stays_while_the_others_would_miss_the_objective():
    """One of five goes only once four would write within it: 0.8 of it becomes all of it."""
    fleet = Fleet(slo=Slo(ttft_s=1.0, tpot_s=0.05))
    fleet.follow(80, minutes=10)
    before = fleet.serving["decode"]
    fleet.follow(80, tpot_p95_s=0.06)
    assert fleet.follow(80, minutes=60, tpot_p95_s=0.046)[-1]["decode"] == before + 1
    assert fleet.follow(80, minutes=60, tpot_p95_s=0.03)[-1]["decode"] == before


def test_one_more_only_once_the_last_is_there():
    """A launcher that failed for an hour was asked for one more each two and a half minutes, and then for all at
    once."""
    fleet = Fleet(slo=Slo(ttft_s=1.0, tpot_s=0.05))
    before = fleet.follow(80, minutes=10)[-1]["decode"]
    wanted = {fleet.ask(80, tpot_p95_s=0.08).wanted["decode"] for _ in range(60)}
    assert wanted == {before + 1}


def test_those_that_the_bounds_refused_are_not_counted():
    """Two hours of tokens that came too slowly at the maximum kept all workers for six hours of silence."""
    bounds = ScalerBounds({"prefill": 1, "decode": 1}, {"prefill": 4, "decode": 4}, most_together=8)
    fleet = Fleet(bounds, slo=Slo(ttft_s=1.0, tpot_s=0.05))
    assert fleet.follow(60, minutes=120, tpot_p95_s=0.08)[-1]["decode"] == 4
    assert fleet.follow(0, minutes=60)[-1]["decode"] == 1


# ---- bounds and changes ----


def test_bounds_hold_whatever_comes():
    bounds = ScalerBounds({"prefill": 2, "decode": 1}, {"prefill": 5, "decode": 4}, most_together=7)
    fleet, rng = Fleet(bounds), random.Random(0)
    for _ in range(100):
        (have,) = fleet.follow(rng.choice([0, 5, 500, 5000]))
        assert 2 <= have["prefill"] <= 5 and 1 <= have["decode"] <= 4 and sum(have.values()) <= 7


@pytest.mark.parametrize(
    ("least", "most", "together", "words"),
    [
        ({"prefill": 3, "decode": 1}, {"prefill": 2, "decode": 2}, 9, "prefill workers: at least 3 and at most 2"),
        ({"prefill": 0, "decode": 0}, {"prefill": 2, "decode": 2}, 9, "decode workers: at least 1"),
        ({"prefill": 5, "decode": 5}, {"prefill": 6, "decode": 6}, 9, "10 workers at least, and 9 at most together"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(least, most, together, words):
    with pytest.raises(ValueError, match=words):
        ScalerBounds(least, most, together)


def test_a_worker_too_many_of_one_role_becomes_one_of_the_other():
    decision = ScaleDecision({"prefill": 5, "decode": 2}, {})
    found = decision.changes({"prefill": 2, "decode": 4}, {"prefill": 1, "decode": 0})
    assert found == [ScaleChange("change", "decode", 2, "prefill")]
    found = decision.changes({"prefill": 2, "decode": 3}, {"prefill": 0, "decode": 0})
    assert found == [ScaleChange("change", "decode", 1, "prefill"), ScaleChange("start", "prefill", 2)]
    assert found[0].words == "change 1 decode into prefill"
    assert decision.changes({"prefill": 6, "decode": 2}, {"prefill": 0, "decode": 0}) == [
        ScaleChange("drain", "prefill", 1)
    ]


def test_none_goes_for_those_that_start():
    """They may wait for a GPU that does not come, while what serves is what is wanted."""
    decision = ScaleDecision({"prefill": 1, "decode": 2}, {})
    assert decision.changes({"prefill": 1, "decode": 2}, {"prefill": 3, "decode": 4}) == []
    assert decision.changes({"prefill": 0, "decode": 3}, {"prefill": 0, "decode": 4}) == [
        ScaleChange("change", "decode", 1, "prefill")
    ]


def test_without_prefill_workers_decode_workers_read_too():
    bounds = ScalerBounds({"prefill": 0, "decode": 1}, {"prefill": 0, "decode": 20})
    fleet = Fleet(bounds, prefill=0)
    assert fleet.follow(20)[-1] == {"prefill": 0, "decode": math.ceil((2.0 + 0.8) / MOST_BUSY / 0.96)}


# ---- a day ----


@pytest.mark.parametrize(("seed", "rate"), [(0, 60), (1, 60), (2, 150)])
def test_a_day_takes_little_more_than_an_oracle(seed, rate):
    day = generated_day(seed, rate, 2000, 200)
    found = run_day(day, FlatModel(), Scaler(FlatModel(), BOUNDS, Slo(), 90), BOUNDS, 90)
    assert found.hours <= 1.15 * found.oracle_hours
    assert found.missed <= 0.0005
    assert found.num_turns <= 2


def test_the_oracle_holds_each_minute_and_nothing_less_does():
    for minute in generated_day(3, 100, 1000, 100)[::30]:
        needed = needed_workers(minute, FlatModel(), BOUNDS)
        work = minute.requests_per_s * FlatModel().read_s(minute.prompt_tokens)
        assert (needed["prefill"] - 1) * MOST_BUSY < work <= needed["prefill"] * MOST_BUSY + 1e-9


def test_a_generated_day_is_of_its_seed():
    assert generated_day(1, 10, 100, 10) == generated_day(1, 10, 100, 10) != generated_day(2, 10, 100, 10)


def test_a_day_without_prefill_workers():
    """Decode workers read the prompts, so they are what a request needs, and what an oracle has."""
    bounds = ScalerBounds({"prefill": 0, "decode": 1}, {"prefill": 0, "decode": 200})
    day = generated_day(0, 60, 2000, 200)
    found = run_day(day, FlatModel(), Scaler(FlatModel(), bounds, Slo(), 90), bounds, 90)
    assert found.missed <= 0.0005 and found.oracle_hours <= found.hours <= 1.15 * found.oracle_hours


def test_a_trace_with_one_stray_stamp_is_refused():
    """It took all memory: 28 million minutes of it."""
    with pytest.raises(ValueError, match=r"28,333,333 minutes from first to last, 86,400 at most"):
        minutes_of([TraceEntry(0, 100, 10), TraceEntry(1_700_000_000, 100, 10)])


def test_a_trace_by_minutes():
    found = minutes_of([TraceEntry(0, 100, 10), TraceEntry(59, 300, 30), TraceEntry(121, 50, 5)])
    assert [minute.requests_per_s for minute in found] == [2 / 60, 0, 1 / 60]
    assert found[0][1:] == (200, 20) and math.isnan(found[1].prompt_tokens)
