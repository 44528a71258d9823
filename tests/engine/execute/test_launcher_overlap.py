"""Two steps in flight: the next decode step is launched while the tokens of the one before are still on the device.

The device is replaced by one that computes as late as it may, so that whatever the loop did too early would be seen.
"""

import random
import time
from dataclasses import replace

import pytest
import torch

from baton.engine.core.batch import known_ids
from baton.engine.core.request import FinishReason, Refusal
from baton.engine.execute.launcher import GpuLauncher, Launcher, StagedLauncher
from baton.engine.gpu_ranks.launcher import LeadingLauncher
from baton.planning.virtual_engine import VirtualLauncher
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.late_launcher import LateLauncher, launches_of
from tests.support.engine.toy_engine import TOY_VOCAB, engine_request, toy_answer, toy_engine, toy_logits


def two_deep(*proposers, **options):
    engine = toy_engine(*proposers, **options)
    engine.runner.launcher = LateLauncher(engine.runner.model, engine.pool)
    return engine


def prompt(num_tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(TOY_VOCAB) for _ in range(num_tokens)]


def stopping(name: str, ids: list[int], after: int, **options):
    """A request whose greedy answer ends at a stop token behind `after` tokens or before."""
    tokens = list(ids)
    for _ in range(after):
        tokens.append(int(toy_logits(tokens).argmax()))
    return engine_request(name, ids, 200, stop_token_ids=frozenset(tokens[-1:]), **options)


def workload(seed: int) -> list:
    chance = random.Random(seed)
    shared = [prompt(140, 1000 * seed + index) for index in range(2)]
    requests = []
    for index in range(14):
        ids = shared[chance.randrange(2)][: chance.choice((70, 129, 140))] if chance.random() < 0.5 else []
        ids = ids + prompt(chance.randint(1, 90), 100 * seed + index)
        options = dict(priority=chance.choice((0, 0, 1)), seed=index, n=chance.choice((1, 1, 1, 2, 3)))
        if chance.random() < 0.5:
            options["temperature"] = chance.choice((0.7, 1.3))
        if chance.random() < 0.2:
            options |= chance.choice((dict(top_k=20), dict(top_p=0.8), dict(min_p=0.05, logit_bias=((5, 1.0),))))
        max_tokens = chance.choice((1, 2, 20, 60, 120))
        if chance.random() < 0.1:  # takes the general sampler: such a step is not launched ahead
            options["logprobs"], max_tokens = 1, 10
        if chance.random() < 0.5:
            stops = chance.sample(range(TOY_VOCAB), 6)
            options |= dict(stop_token_ids=frozenset(stops), min_tokens=chance.choice((0, 0, 12)))
        requests.append(engine_request(f"r{index}", ids, max_tokens, **options))
    return requests


def served(engine, requests, seed: int) -> Collector:
    """Comes in and is cancelled at random, checked after every step."""
    chance, records, left = random.Random(seed), Collector(), list(requests)
    doomed = {request.key: chance.randint(1, 40) for request in requests if chance.random() < 0.3}
    for _ in range(6000):
        while left and chance.random() < 0.3:
            try:
                engine.submit(left[0])
                left.pop(0)
            except Refusal:
                break
        for key in list(doomed):
            made = sum(map(len, records[key].tokens.values()))
            if made >= doomed[key] and chance.random() < 0.5:
                engine.cancel(key)
                del doomed[key]
        records.take(engine.step())
        engine.check_integrity()
        if not left and not engine.has_work():
            break
    assert not left and engine.ledger.num_available == engine.num_blocks
    return records


@pytest.mark.parametrize("num_blocks, num_seqs", [(128, 8), (40, 8), (32, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_of_one_step_at_a_time(seed, num_blocks, num_seqs):
    """Cancels, stops, choices, preemption, prefix hits: what is given out is what one step at a time gives."""
    requests = workload(seed)
    options = dict(num_blocks=num_blocks, max_num_seqs=num_seqs)
    engine = two_deep(**options)
    records, plain = served(engine, requests, seed), served(toy_engine(**options), requests, seed)
    assert engine.runner.launcher.num_overlapped > 10 and not engine.runner.launcher.waiting
    for request in requests:
        expected, found, alone = toy_answer(request), records[request.key], plain[request.key]
        assert found.ended is not None and found.ended.error in ("", "cancelled")
        for choice, tokens in found.tokens.items():
            assert tokens == expected[choice][0][: len(tokens)]
        if not found.ended.error:
            assert found.answer() == expected
            assert alone.ended.error == "cancelled" or alone.answer() == found.answer()


@pytest.mark.parametrize("seed", range(3))
def test_states_are_kept_as_they_stood_behind_each_step(seed):
    """The toy model looks at every state that it is given. Copies come in the order of launches, as on a stream: what
    is copied when a step is read stands behind the next one already."""
    options = dict(num_blocks=64, max_num_seqs=4, num_states=12, checkpoint_tokens=64)
    engine, requests = two_deep(**options), workload(seed)
    launcher, copy = engine.runner.launcher, engine.scheduler.copies.state
    ordered = engine.scheduler.copies._replace(state=lambda *ids: (launcher.wait(), copy(*ids)))
    engine.scheduler.copies = ordered
    records = served(engine, requests, seed)
    again = [replace(request, key=request.key._replace(attempt=1)) for request in requests]
    found = served(engine, again, seed)
    answered = [record for record in found.values() if record.first is not None]
    assert launcher.num_overlapped > 10 and any(record.first.num_cached_tokens for record in answered)
    for record, request in ((records[each.key], each) for each in requests):
        assert record.ended.error == "cancelled" or record.answer() == toy_answer(request)
    for record, request in ((found[each.key], each) for each in again):
        assert record.ended.error == "cancelled" or record.answer() == toy_answer(request)
    assert engine.ledger.states.counts()["running"] == 0


def test_what_ended_keeps_its_blocks_until_the_step_behind_has_passed():
    """Its stop token is read when the next step, with one more token of it, is on its way."""
    engine = two_deep(num_blocks=16, max_num_seqs=2)
    ending = stopping("ending", prompt(30, 1), 9)
    other = engine_request("other", prompt(20, 2), 100)
    engine.submit(ending)
    engine.submit(other)
    records = Collector()
    while not records[ending.key].reasons:
        records.take(engine.step())
    assert records[ending.key].reasons == {0: FinishReason.STOP}
    assert records[ending.key].ended is None  # a step that may write into its blocks has not passed
    assert len(engine.runner.launcher.waiting) == 1
    held = engine.ledger.counts()["running"]
    engine.check_integrity()
    records.take(engine.step())
    assert records[ending.key].ended.error == "" and engine.ledger.counts()["running"] < held
    run_to_end(engine, collector=records)
    for request in (ending, other):
        assert records[request.key].answer() == toy_answer(request)


def test_no_step_is_launched_behind_the_last_token():
    engine = two_deep()
    request = engine_request("a", prompt(30, 1), 20)
    records = run_to_end(engine, [request])
    assert records[request.key].answer() == toy_answer(request)
    # One token of the prompt's step, 19 of decode steps; the first of these was chosen with nothing in flight.
    assert len(engine.runner.model.batch_sizes) == 20 and engine.runner.launcher.num_overlapped == 18


def test_commands_are_obeyed_with_nothing_in_flight():
    """A cancelled request's blocks are free at once: no step that may touch them is left."""
    engine = two_deep()
    requests = [engine_request(name, prompt(40, index), 300) for index, name in enumerate("ab")]
    records = Collector()
    for request in requests:
        engine.submit(request)
    for _ in range(20):
        records.take(engine.step())
    assert engine.runner.launcher.waiting
    engine.cancel(requests[0].key)
    records.take(engine.step())
    assert records[requests[0].key].ended.error == "cancelled"
    assert all(piece.seq.group.key == requests[1].key for piece in engine._flights[0].slices)
    run_to_end(engine, collector=records)
    assert records[requests[1].key].answer() == toy_answer(requests[1])


def test_a_deadline_ends_what_is_in_flight():
    engine = two_deep()
    request = engine_request("a", prompt(40, 1), 400, deadline=time.monotonic() + 1e6)
    engine.submit(request)
    records = Collector()
    for _ in range(10):
        records.take(engine.step())
    group = engine.admission.groups[request.key]
    group.deadline = 0.0
    engine.admission.groups.add_deadline(group)
    run_to_end(engine, collector=records)
    assert records[request.key].ended.error == "deadline" and engine.ledger.num_available == engine.num_blocks


def test_a_step_that_fails_in_flight_ends_its_keys_and_the_next_ones_are_served():
    engine = two_deep()
    request = engine_request("a", prompt(40, 1), 300)
    engine.submit(request)
    records = Collector()
    for _ in range(10):
        records.take(engine.step())

    def broken(batch):
        raise RuntimeError("lost")

    engine.runner.model.before_forward = broken
    with pytest.raises(RuntimeError, match="lost"):
        for _ in range(3):
            records.take(engine.step())
    engine.runner.launcher.waiting.clear()
    records.take(engine.fail("lost"))
    assert records[request.key].ended.error == "failed"
    engine.runner.model.before_forward = lambda batch: None
    again = replace(request, key=request.key._replace(attempt=1))
    assert run_to_end(engine, [again])[again.key].answer() == toy_answer(again)


def test_what_waits_and_could_enter_is_not_kept_waiting():
    engine = two_deep(max_num_seqs=2)
    first, second = (engine_request(name, prompt(40, index), 60) for index, name in enumerate("ab"))
    engine.submit(first)
    records = Collector()
    for _ in range(6):
        records.take(engine.step())
    engine.submit(second)
    records.take(engine.step())
    records.take(engine.step())
    assert records[second.key].first is not None
    run_to_end(engine, collector=records)
    assert records[first.key].answer() == toy_answer(first) and records[second.key].answer() == toy_answer(second)


@pytest.mark.parametrize("kind", [GpuLauncher, LeadingLauncher, StagedLauncher, VirtualLauncher, LateLauncher])
def test_a_launcher_of_its_own_kind_allows_no_multi_step(kind):
    """A native call of several steps computes them past the launcher."""
    assert Launcher.allows_multi_step and not kind.allows_multi_step


def test_tokens_of_the_step_before_take_their_places():
    ids = torch.tensor([5, ~0, 7, ~2, ~2])
    assert known_ids(ids, torch.tensor([50, 51, 52])).tolist() == [5, 50, 7, 52, 52]


def test_a_chunk_is_launched_before_the_one_before_it_is_read():
    """And the last one, whose token is drawn on the device; behind that the next prompt."""
    engine = two_deep(max_num_batched_tokens=66, max_num_seqs=2)
    launches = launches_of(engine)
    requests = [engine_request("a", prompt(200, 1), 1), engine_request("b", prompt(100, 2), 1)]
    for request in requests:
        engine.submit(request)
    records, deepest = Collector(), []
    while engine.has_work():
        records.take(engine.step())
        engine.check_integrity()
        deepest.append(len(engine.runner.launcher.waiting))
    assert launches == [
        [("a", 0, 64)],
        [("a", 64, 128)],
        [("a", 128, 192)],
        [("a", 192, 200)],
        [("b", 0, 64)],
        [("b", 64, 100)],
    ]
    assert engine.runner.launcher.num_overlapped == 5 and deepest[:5] == [1] * 5
    for request in requests:
        assert records[request.key].answer() == toy_answer(request)


def test_a_command_of_another_key_is_obeyed_behind_the_launch():
    """What joins decodes in the step behind the one in flight: before, the device waited for it."""
    engine = two_deep(max_num_seqs=4)
    first, second = engine_request("a", prompt(40, 1), 60), engine_request("b", prompt(70, 2), 20)
    engine.submit(first)
    records = Collector()
    for _ in range(6):
        records.take(engine.step())
    launches, before = launches_of(engine), engine.runner.launcher.num_overlapped
    engine.submit(second)
    for _ in range(8):
        records.take(engine.step())
        engine.check_integrity()
    assert engine.runner.launcher.num_overlapped - before == len(launches) == 8, "no launch found the device idle"
    assert ("b", 0, 70) in launches[0] and len(launches[0]) == 2
    assert ("b", 70, 71) not in launches[1], "its first token is being drawn"
    assert ("b", 70, 71) in launches[2]
    run_to_end(engine, collector=records)
    for request in (first, second):
        assert records[request.key].answer() == toy_answer(request)


def test_a_prompt_whose_beginning_is_being_read_waits_for_it():
    """Launched behind it, it would be read a second time; one step later it is in the prefix cache."""
    engine = two_deep(max_num_batched_tokens=256)
    shared = prompt(128, 1)
    ids = [shared + prompt(10 + index, 2 + index) for index in range(2)]
    requests = [engine_request(name, each, 3) for name, each in zip("ab", ids, strict=True)]
    engine.submit(requests[0])
    records = Collector()
    records.take(engine.step())
    engine.submit(requests[1])
    run_to_end(engine, collector=records)
    assert records[requests[1].key].first.num_cached_tokens == 128
    for request in requests:
        assert records[request.key].answer() == toy_answer(request)


def test_prompts_of_two_tenants_are_chosen_with_nothing_in_flight():
    """Who gives way is decided by what each holds."""
    engine = two_deep(max_num_batched_tokens=66, max_num_seqs=2)
    requests = [
        engine_request(name, prompt(150, index), 4, tenant_mark=bytes([index]) * 16) for index, name in enumerate("ab")
    ]
    records = run_to_end(engine, requests)
    for request in requests:
        assert records[request.key].answer() == toy_answer(request)
