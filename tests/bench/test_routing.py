"""The simulated fleet of bench/routing.py: that it serves everything, and that its figures are right."""

import statistics

import pytest

from baton.loadgen.trace import TraceEntry, read_trace
from baton.service.slo import Slo
from bench.simulation.fleet import BLOCK, Fleet, Machine, copies, oracle_hits
from tests.support.process import ROOT

TRACE = read_trace(ROOT / "bench" / "traces" / "conversation.jsonl")[:150]
SLO = Slo(5.0, 0.1)
MACHINE = Machine()


@pytest.mark.parametrize("split", ["auto", "always", "never"])
def test_everything_is_served_once(split):
    fleet = Fleet(8, MACHINE, split, SLO)
    requests = fleet.run(TRACE)
    assert len(requests) == len(TRACE)
    for request in requests:
        assert request.at_s < request.first_s <= request.last_s
        assert request.num_cached + request.num_read == request.entry.num_prompt
    assert {request.is_local for request in requests} <= {"always": {False}, "never": {True}}.get(split, {True, False})
    for worker in (*fleet.prefill, *fleet.decode):
        assert worker.num_waiting_tokens == 0
    assert all(worker.num_sequences == 0 and not worker.ends and not worker.reading for worker in fleet.decode)


def test_a_turned_request_goes_the_other_way():
    taken = Fleet(8, MACHINE, "auto", SLO).run(TRACE)
    decided = {each.number: each.decision for each in taken if each.number != 40}
    same = Fleet(8, MACHINE, "auto", SLO, decided=decided).run(TRACE)
    assert [each.e2e_s for each in same] == [each.e2e_s for each in taken]
    turned = Fleet(8, MACHINE, "auto", SLO, decided=decided, turned=40).run(TRACE)
    assert [i for i, each in enumerate(turned) if each.is_local != taken[i].is_local] == [40]
    assert all(each.decision == taken[i].decision for i, each in enumerate(turned) if i != 40)


def test_one_request_takes_as_long_as_the_machine_says():
    (request,) = Fleet(2, MACHINE, "always", SLO).run([TraceEntry(0.0, 2000, 101)])
    assert request.ttft_s == pytest.approx(MACHINE.prompt_s + 2000 * MACHINE.token_s + MACHINE.hop_s)
    assert request.tpot_s == pytest.approx(MACHINE.step_s + MACHINE.sequence_s, rel=0.01)
    (local,) = Fleet(2, MACHINE, "never", SLO).run([TraceEntry(0.0, 2000, 101)])
    assert local.ttft_s == pytest.approx(MACHINE.prompt_s + 2000 * MACHINE.token_s)


def test_a_prompt_that_was_read_is_found_again():
    entry = TraceEntry(0.0, 4 * BLOCK, 10, (1, 2, 3, 4))
    again = TraceEntry(60.0, 5 * BLOCK, 10, (1, 2, 3, 4, 5))
    first, second = Fleet(8, MACHINE, "always", SLO).run([entry, again])
    assert first.num_cached == 0 and second.num_cached == 4 * BLOCK


def test_a_cache_forgets_the_oldest():
    small = Machine(cached_tokens=4 * BLOCK)
    entries = [TraceEntry(60.0 * i, 4 * BLOCK, 2, tuple(range(4 * i, 4 * i + 4))) for i in range(3)]
    entries.append(TraceEntry(600.0, 4 * BLOCK, 2, entries[0].hash_ids))
    assert Fleet(2, small, "never", SLO, prefill_share=0.5).run(entries)[-1].num_cached == 0
    assert oracle_hits(entries, 4 * BLOCK) == 0 and oracle_hits(entries, None) == 4 * BLOCK - 1


def test_nothing_beats_a_cache_without_end():
    requests = Fleet(8, MACHINE, "auto", SLO).run(TRACE)
    hits = sum(request.num_cached for request in requests)
    assert 0 < hits <= oracle_hits(TRACE, None) and oracle_hits(TRACE, 10_000) <= oracle_hits(TRACE, None)


def test_copies_share_the_first_block_and_nothing_else():
    made = copies(TRACE, 3)
    assert len(made) == 3 * len(TRACE) and made == sorted(made, key=lambda entry: entry.at_s)
    ids = [set(entry.hash_ids) for entry in copies(TRACE[:1], 3)]
    assert set.intersection(*ids) == {TRACE[0].hash_ids[0]}


def test_what_is_predicted_comes_true_where_nothing_comes_between():
    requests = Fleet(8, MACHINE, "always", SLO).run([TraceEntry(10.0 * i, 4000, 20) for i in range(40)])
    off = [abs(request.predicted_s - request.ttft_s) / request.ttft_s for request in requests[10:]]
    assert statistics.median(off) < 0.1
