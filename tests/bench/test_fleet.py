"""The simulated fleet of bench/fleet.py: nothing is lost, whatever happens to it, and the product's own code is what
saves it."""

import math

import pytest

from baton.planning.scaling.scaler import Scaler, ScalerBounds
from baton.service.slo import Slo
from bench.simulation.autoscaling import Autoscaling
from bench.simulation.drawn_load import drawn_load
from bench.simulation.fleet import DecodeWorker, Machine
from bench.simulation.live_fleet import NOTICED_S, LiveFleet, met_between
from bench.simulation.machine_model import MachineModel

MACHINE, SLO = Machine(), Slo(2.0, 0.05)


def fleet_of(num_workers=16, num_gateways=4, machine=MACHINE) -> LiveFleet:
    return LiveFleet(num_workers, num_gateways, machine, SLO)


def load(rate=25, until_s=30.0, shape=(2000, 100), **options):
    return drawn_load(lambda second: rate, until_s, shape, **options)


def check(fleet: LiveFleet, asked) -> None:
    """Every request ended once, in full or refused, and no worker that lives holds anything of it."""
    for one in asked:
        assert one.ended and not one.queue_entry
        if not one.refused:
            assert one.num_done == one.entry.num_output and one.entry.at_s < one.first_s <= one.last_s
    for gateway in fleet.gateways:
        assert not gateway.admission.key_ids and not len(gateway.queues)
    for worker in fleet.workers:
        assert not worker.num_waiting_tokens or worker.name in fleet.dead
        if isinstance(worker, DecodeWorker) and worker.name not in fleet.dead:
            assert not worker.num_sequences and not worker.ends and not worker.reading


def test_all_are_served_at_the_first_attempt():
    fleet = fleet_of()
    asked = fleet.serve(load())
    check(fleet, asked)
    assert {one.num_attempts for one in asked} == {1} and met_between(asked, SLO, 0, 30) == 1.0


@pytest.mark.parametrize("num", [1, 4])
def test_what_ran_on_nodes_that_die_is_continued_elsewhere(num):
    fleet = fleet_of()
    fleet.kill_at(10.0, num)
    asked = fleet.serve(load())
    check(fleet, asked)
    assert not any(one.refused for one in asked)
    assert fleet.num_failures["death"] and fleet.num_workers == 16 - num
    touched = [one for one in asked if one.num_attempts > 1]
    assert touched and all(one.entry.at_s < 10 + NOTICED_S for one in touched), "who comes later never meets the dead"
    assert met_between(asked, SLO, 20, 30) == 1.0


def test_tokens_that_a_user_has_are_not_written_again():
    """An answer that is nearly done when its node dies takes only its rest elsewhere."""
    fleet = LiveFleet(4, 1, MACHINE, SLO, prefill_share=0.0)
    fleet.kill_at(5.0, 1)
    asked = fleet.serve(load(2, 4.0, (300, 400), seed=3))
    check(fleet, asked)
    moved = [one for one in asked if one.num_attempts > 1]
    assert moved
    for one in moved:
        whole_s = one.entry.num_output * MACHINE.step_s
        assert one.last_s - one.entry.at_s < whole_s * 1.6 + NOTICED_S


def test_a_version_that_fails_everything_is_set_aside_by_breakers():
    fleet, num_bad, seconds = fleet_of(), 4, 15
    fleet.roll_out_at(5.0, num_bad, 5.0 + seconds)
    asked = fleet.serve(load(40))
    check(fleet, asked)
    assert not any(one.refused for one in asked)
    # Two failures open a breaker, its pauses double from 1 s; requests that were on their way then fail too.
    probes = math.ceil(math.log2(seconds)) + 2
    assert 0 < fleet.num_failures["rollout"] <= 2 * 4 * num_bad * probes
    late = [one for one in asked if 12 <= one.entry.at_s < 20]
    assert sum(one.num_attempts > 1 for one in late) < 0.15 * len(late)


def test_without_the_index_all_is_served_and_prefixes_are_found_again():
    fleet = fleet_of()
    fleet.lose_redis_at(10.0, 5.0)
    asked = fleet.serve(load(30, 50.0, num_prefixes=4))
    check(fleet, asked)

    def cached(begin_s, end_s):
        found = [one for one in asked if begin_s <= one.entry.at_s < end_s]
        return sum(one.num_cached for one in found) / len(found)

    assert cached(11, 15) < cached(5, 10) and cached(30, 50) >= 0.9 * cached(5, 10)
    assert not any(one.refused for one in asked)


def test_a_fleet_that_is_too_small_refuses_and_loses_nothing():
    fleet = fleet_of(2, 2, MACHINE._replace(max_sequences=16))
    asked = fleet.serve(load(30, 10.0))
    check(fleet, asked)
    refused = {one.refused for one in asked} - {""}
    assert refused and refused <= {"TTFT_BUDGET", "TPOT_BUDGET", "QUEUE_WAIT"}


def test_the_same_seed_gives_the_same_fleet():
    def run():
        fleet = fleet_of()
        fleet.kill_at(3.0, 2)
        return [(one.first_s, one.last_s, one.num_attempts) for one in fleet.serve(load(20, 8.0))]

    assert run() == run()


def test_the_scaler_follows_a_load_and_nothing_is_lost():
    fleet = fleet_of(2, 2)
    bounds = ScalerBounds({"prefill": 1, "decode": 1}, {"prefill": 30, "decode": 30})
    scaling = Autoscaling(fleet, Scaler(MachineModel(MACHINE, SLO), bounds, SLO, 30.0), 30.0)
    asked = fleet.serve(
        drawn_load(lambda second: 4 if second < 600 else 12 if second < 1200 else 0.5, 2700.0, (1500, 30))
    )
    check(fleet, asked)
    sizes = {at_s: prefill + decode for at_s, prefill, decode in scaling.sizes}
    assert sizes[600.0] < sizes[900.0] and sizes[2640.0] == 2
    assert met_between(asked, SLO, 800, 2700) > 0.99
    moves = [
        later - earlier for earlier, later in zip(list(sizes.values()), list(sizes.values())[1:]) if later != earlier
    ]
    assert sum((one > 0) != (other > 0) for one, other in zip(moves, moves[1:])) <= 3
