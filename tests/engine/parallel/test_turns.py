"""A step in each stage: sequences take turns, and what is given out is what one step at a time gives. The stages are
replaced by some that compute a step as soon or as late as it may be."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton.engine.core.batch import ForwardBatch
from baton.engine.engine import Engine
from baton.engine.execute.launcher import StagedLauncher
from baton.engine.kv.pool import KVPool
from baton.engine.schedule import steps
from baton.engine.schedule.steps import MIN_SEQS
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.late_launcher import launches_of
from tests.support.engine.serving import random_lives
from tests.support.engine.toy_engine import TOY_VOCAB, ToyModel, engine_request, toy_answer, toy_engine

SHARED = [7 + index % 80 for index in range(200)]
OPTIONS = dict(max_num_seqs=48, num_blocks=512, max_num_batched_tokens=256)


class ToyStages(ToyModel):
    """The first of several stages: what was begun is computed in order, each at any time until it is finished."""

    def __init__(self, model: ToyModel, num_stages: int, seed: int):
        super().__init__(model.spec.context, model.spec.windows)
        self.pipeline = SimpleNamespace(degree=num_stages, drain=lambda: self.inside.clear())
        self.inside: list[SimpleNamespace] = []  # begun, and not finished; `rows` once they are computed
        self.num_overlapped, self._chance = 0, random.Random(seed)

    def begin(self, batch: ForwardBatch, pool: KVPool) -> SimpleNamespace:
        taken = [slot for step in self.inside for slot in step.batch.slots.tolist()]
        assert len(self.inside) < self.pipeline.degree and not {*taken} & {*batch.slots.tolist()}
        self.num_overlapped += bool(self.inside)
        self.inside.append(SimpleNamespace(batch=batch, pool=pool, rows=None))
        while self._chance.random() < 0.5 and any(step.rows is None for step in self.inside):
            self._compute()
        return self.inside[-1]

    def finish(self, step: SimpleNamespace, on_layer=None) -> torch.Tensor:
        while step.rows is None:
            self._compute()
        assert self.inside.pop(0) is step, "out of order"
        return step.rows

    def _compute(self) -> None:
        step = next(step for step in self.inside if step.rows is None)
        step.rows = self.hidden(step.batch, step.pool)


def staged_engine(num_stages: int, seed: int = 0, **options) -> Engine:
    """As toy_engine, of so many stages."""
    engine = toy_engine(**options)
    runner = engine.runner
    runner.model = ToyStages(runner.model, num_stages, seed)
    runner.launcher = StagedLauncher(runner.model, engine.pool)
    return engine


def ids_of(num_tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(TOY_VOCAB) for _ in range(num_tokens)]


def request_of(chance: random.Random, index: int):
    shared = SHARED[: chance.choice((0, 0, 64, 130, 200))]
    own = [chance.randrange(5, 90) for _ in range(chance.choice((1, 5, 40, 63, 64, 100)))]
    options = dict(seed=index, n=chance.choice((1, 1, 1, 2, 5)), priority=chance.choice((0, 0, 1)))
    if chance.random() < 0.5:
        options |= dict(temperature=chance.choice((0.7, 1.3)), logprobs=chance.choice((None, 1)))
    if chance.random() < 0.3:
        options["stop_token_ids"] = frozenset(chance.sample(range(TOY_VOCAB), 6))
    return engine_request(f"r{index}", shared + own, chance.choice((1, 3, 20, 70)), **options)


def of_tenants(chance: random.Random, index: int):
    request = request_of(chance, index)
    return replace(request, tenant_mark=bytes([index % 2]) * 16) if index > 45 else request


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        dict(num_blocks=512, max_num_seqs=36),
        dict(num_blocks=128, max_num_seqs=24),
        dict(num_blocks=48, max_num_seqs=9),
        dict(num_blocks=128, max_num_seqs=20, num_states=28, checkpoint_tokens=64),
        dict(num_blocks=128, max_num_seqs=20, window=80),
        dict(num_blocks=128, max_num_seqs=20, windows=(80, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("made", [request_of, of_tenants])
def test_random_lives_in_stages_answer_as_alone(seed, num_stages, options, made, monkeypatch):
    """Submitted, cancelled, parked and resumed, preempted, stopped, found again in the cache; also of two tenants in
    the end. Turns of one sequence, as few live at a time."""
    monkeypatch.setattr(steps, "MIN_SEQS", 1)
    engine = staged_engine(num_stages, seed, max_num_batched_tokens=256, **options)
    turns = turns_of(engine)
    for request, record in random_lives(engine, random.Random(seed), 90, made):
        assert record.ended.error == "" and record.answer() == toy_answer(request, options.get("window", 1 << 30))
    assert made is of_tenants or sum(turns) > 20  # tenants share with one step at a time
    assert not engine.runner.model.inside
    assert engine.ledger.num_available == engine.num_blocks


def turns_of(engine: Engine) -> list[bool]:
    """Return of each launch from here on whether others that decode are in flight as it decodes."""
    turns, launch = [], engine.runner.launch

    def decodes(slices) -> bool:
        return any(seq.group.prefilled for seq, _, _ in slices)

    def noted(slices, *given):
        turns.append(decodes(slices) and any(decodes(flight.slices) for flight in engine._flights))
        return launch(slices, *given)

    engine.runner.launch = noted
    return turns


def decoding(num_stages: int, count: int, **options) -> tuple[Engine, Collector, list]:
    """An engine whose `count` requests all decode, what they gave out, and they."""
    engine, records = staged_engine(num_stages, **(OPTIONS | options)), Collector()
    requests = [engine_request(f"r{index}", ids_of(20, index), 60) for index in range(count)]
    for request in requests:
        engine.submit(request)
    while any(records[request.key].first is None for request in requests):
        records.take(engine.step())
    for _ in range(2 * num_stages):
        records.take(engine.step())
    return engine, records, requests


@pytest.mark.parametrize(
    ("num_stages", "count", "sizes"),
    [
        (2, 2 * MIN_SEQS - 1, [2 * MIN_SEQS - 1]),
        (2, 2 * MIN_SEQS, [MIN_SEQS, MIN_SEQS]),
        (2, 4 * MIN_SEQS - 1, [2 * MIN_SEQS - 1, 2 * MIN_SEQS]),
        (3, 3 * MIN_SEQS, [MIN_SEQS] * 3),
        (4, 2 * MIN_SEQS + 1, [MIN_SEQS, MIN_SEQS + 1]),
    ],
)
def test_each_stage_has_an_equal_part_and_nobody_waits_for_more_than_the_others(num_stages, count, sizes):
    engine, records, requests = decoding(num_stages, count)
    launches = launches_of(engine)
    for _ in range(12):
        records.take(engine.step())
        assert len(engine.runner.model.inside) == len(sizes) - 1
    turns = len(sizes)
    for index in range(len(launches) - turns):
        following = launches[index : index + turns]
        names = [name for launch in following for name, _, _ in launch]
        assert sorted(names) == sorted(request.key.request_id for request in requests), "each once in as many launches"
        assert sorted(map(len, following)) == sizes
    run_to_end(engine, collector=records)
    assert all(records[request.key].answer() == toy_answer(request) for request in requests)


def test_turns_are_made_anew_as_sequences_come_and_go():
    """However many there were before, each has a token in as many launches as there are stages, and one more while they
    are dealt out again."""
    engine, records, requests = decoding(2, 32)
    launches = launches_of(engine)
    for index, request in enumerate(requests[:17]):
        engine.cancel(request.key)
        for _ in range(index % 3):
            records.take(engine.step())
    added = [engine_request(f"more{index}", ids_of(9, index), 30) for index in range(6)]
    for request in added:
        engine.submit(request)
        records.take(engine.step())
    run_to_end(engine, collector=records)
    last: dict[str, int] = {}
    for index, launch in enumerate(launches):
        for name, begin, end in launch:
            assert end > begin + 1 or index - last.get(name, index) <= 3, f"{name} waited"
            last[name] = index
    assert all(records[request.key].answer() == toy_answer(request) for request in (*requests[17:], *added))


def test_nobody_starves_where_no_step_may_follow():
    """For lack of blocks, say: who was computed last waits."""
    engine, records, requests = decoding(2, 2 * MIN_SEQS)
    engine.scheduler.follow = lambda *given: []
    while engine._flights:
        records.take(engine.step())
    launches = launches_of(engine)
    for _ in range(6):
        records.take(engine.step())
    for launch, following in zip(launches, launches[1:]):
        assert len(launch) == MIN_SEQS and len({name for name, _, _ in (*launch, *following)}) == 2 * MIN_SEQS
    run_to_end(engine, collector=records)
    assert all(records[request.key].answer() == toy_answer(request) for request in requests)


def test_few_sequences_are_computed_as_without_stages():
    """In as many steps, each given out by the call that began it."""
    requests = [engine_request(f"r{index}", ids_of(20, index), 10) for index in range(MIN_SEQS)]
    plain, engine = toy_engine(**OPTIONS), staged_engine(2, **OPTIONS)
    expected, found = run_to_end(plain, requests), Collector()
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        outputs = engine.step()
        assert outputs and not engine.runner.model.inside
        found.take(outputs)
    assert engine.runner.model.batch_sizes == plain.runner.model.batch_sizes
    assert all(found[key].answer() == record.answer() for key, record in expected.items())


def test_all_choices_of_a_request_take_one_turn():
    """One of them may end all."""
    engine = staged_engine(2, **OPTIONS)
    requests = [
        engine_request(f"r{index}", ids_of(20, index), 20, temperature=1.0, seed=index, n=4) for index in range(6)
    ]
    launches = launches_of(engine)
    records = run_to_end(engine, requests)
    decoded = [launch for launch in launches if all(end == begin + 1 for _, begin, end in launch)]
    assert {len(launch) for launch in decoded} >= {12} and engine.runner.model.num_overlapped > 10
    for launch in decoded:
        names = [name for name, _, _ in launch]
        assert {names.count(name) for name in names} == {4}
    assert all(records[request.key].answer() == toy_answer(request) for request in requests)


def test_a_prompt_alone_goes_on_behind_its_own_chunks():
    engine = staged_engine(2, **OPTIONS)
    launches, request = launches_of(engine), engine_request("a", ids_of(500, 1), 2)
    records = run_to_end(engine, [request])
    assert launches == [[("a", 0, 256)], [("a", 256, 500)], [("a", 500, 501)]]
    assert engine.runner.model.num_overlapped == 1 and records[request.key].answer() == toy_answer(request)


def test_chunks_beside_sequences_that_decode_are_short():
    """A token waits for the chunks of all stages' steps."""
    engine, records, requests = decoding(2, 16)
    launches, prompt = launches_of(engine), engine_request("long", ids_of(450, 99), 2)
    engine.submit(prompt)
    while records[prompt.key].first is None:
        records.take(engine.step())
    chunks = [(begin, end) for launch in launches for name, begin, end in launch if name == "long"][:8]
    assert chunks == [(begin, min(begin + 64, 450)) for begin in range(0, 450, 64)]
    assert all(len(launch) == 9 for launch in launches[1:8]), "eight of sixteen beside a chunk"
    run_to_end(engine, collector=records)
    assert all(records[request.key].answer() == toy_answer(request) for request in (*requests, prompt))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_commands_for_what_is_in_flight_keep_their_order(num_stages):
    """Parked and then resumed, though other steps are in flight still when its own has passed."""
    engine, records, requests = decoding(num_stages, 24)
    for request in requests:
        engine.admission.park(request.key)
        records.take(engine.step())
        engine.admission.resume(request.key)
        engine.check_integrity()
    run_to_end(engine, collector=records)
    assert all(records[request.key].answer() == toy_answer(request) for request in requests)


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_a_step_that_fails_ends_what_is_in_flight_and_the_next_ones_are_served(where, monkeypatch):
    engine, records, requests = decoding(3, 26)
    kept = [engine_request(f"new{index}", ids_of(30, index), 8) for index in range(3)]
    held = {piece.seq.group.key for flight in engine._flights for piece in flight.slices}

    def broken(*given):
        raise RuntimeError("lost")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="lost"):
        patched.setattr(engine.runner.model, where, broken)
        engine.step()
    records.take(engine.fail("lost"))
    engine.check_integrity()
    ended = {request.key for request in requests if records[request.key].ended is not None}
    assert held <= ended and all(records[key].ended.error == "failed_together" for key in ended)
    again = [replace(request, key=request.key._replace(attempt=1)) for request in requests if request.key in ended]
    run_to_end(engine, [*kept, *again], collector=records)
    for request in (*kept, *again, *(request for request in requests if request.key not in ended)):
        assert records[request.key].answer() == toy_answer(request)
