"""The loop's thread: wakes, beats, survives a crash, stops."""

import threading
import time

import pytest
import torch

from baton import failpoints
from baton.engine.core.device import is_lost
from baton.engine.core.request import PrefillDone, Refusal, RequestEnded
from baton.engine.loop import EngineLoop
from baton.failpoints import FailpointError
from tests.support.engine.collector import Collector
from tests.support.engine.handover import copy_kv, going_on
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine, toy_prompt
from tests.support.pace import patience
from tests.support.waiting import until

PATIENCE_S = patience(30)


class Gathered:
    """Outputs of a loop; `wait` returns when a condition on the records holds."""

    def __init__(self, first_index: int = 0):
        self.records = Collector(first_index)
        self.changed = threading.Condition()

    def __call__(self, outputs):
        assert outputs
        with self.changed:
            self.records.take(outputs)
            self.changed.notify_all()

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.records), PATIENCE_S), dict(self.records)


@pytest.fixture
def loop_of():
    loops = []

    def make(engine, gathered) -> EngineLoop:
        loops.append(EngineLoop(engine, gathered))
        loops[-1].start()
        return loops[-1]

    yield make
    for loop in loops:
        loop.stop()
        assert not loop.is_alive


def test_answers_from_many_threads(loop_of):
    engine, gathered = toy_engine(max_num_seqs=8, num_blocks=128), Gathered()
    loop = loop_of(engine, gathered)
    requests = [engine_request(f"r{i}", toy_prompt(30 + 20 * i, i % 3), 30, temperature=1.0, seed=i) for i in range(20)]

    def submit(mine):
        for request in mine:
            while True:
                try:
                    engine.submit(request)
                    break
                except Refusal as refusal:
                    time.sleep(refusal.retry_after_s)

    threads = [threading.Thread(target=submit, args=(requests[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        engine.check_integrity()
        engine.load_report()
    gathered.wait(lambda records: sum(record.ended is not None for record in records.values()) == 20)
    for thread in threads:
        thread.join()
    for request in requests:
        assert gathered.records[request.key].answer() == toy_answer(request)
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks
    assert loop.step_number == engine.step_number > 0


def test_the_beat_goes_on_while_idle_and_stops_with_a_stalled_step(loop_of):
    engine, gathered = toy_engine(), Gathered()
    loop = loop_of(engine, gathered)
    before = loop.last_beat
    until(lambda: loop.last_beat > before)
    stalled, go_on = threading.Event(), threading.Event()

    def stall(batch):
        stalled.set()
        go_on.wait(PATIENCE_S)

    engine.runner.model.before_forward = stall
    request = engine_request("a", toy_prompt(10), max_tokens=2)
    engine.submit(request)
    assert stalled.wait(PATIENCE_S)
    beat = loop.last_beat
    assert engine.load_report().num_running == 1  # answered while the step is in flight
    engine.admission.admit(engine_request("b", toy_prompt(10)))
    time.sleep(0.6)
    assert loop.last_beat == beat
    go_on.set()
    gathered.wait(lambda records: records[request.key].ended is not None)
    until(lambda: loop.last_beat > beat)


def test_a_crash_ends_what_the_step_computed_and_the_loop_goes_on(loop_of):
    """Held prompts, and keys that wait for KV, survive a step's crash."""
    engine, gathered = toy_engine(num_blocks=128), Gathered()
    loop_of(engine, gathered)
    held, running, admitted = (engine_request(name, toy_prompt(90, i), 300) for i, name in enumerate("hra"))
    engine.admission.accept(held)
    gathered.wait(lambda records: records[held.key].first is not None)
    engine.admission.admit(admitted)
    engine.admission.set_aside(admitted.key, 90)

    def crash(batch):
        raise RuntimeError("poison\nin two lines")

    engine.runner.model.before_forward = crash
    engine.submit(running)
    gathered.wait(lambda records: records[running.key].ended is not None)
    ended = gathered.records[running.key].ended
    assert ended.error == "failed" and ended.message == "engine step failed: RuntimeError: poison in two lines"
    engine.check_integrity()
    assert set(engine.admission.groups) == {held.key, admitted.key}
    assert engine.load_report().blocks_by_holder["leased"] == 6
    engine.admission.release_lease(held.key)
    engine.admission.verify(admitted.key, 90)
    engine.admission.fetch_settled(admitted.key)
    engine.cancel(admitted.key)
    gathered.wait(lambda records: records[held.key].ended and records[admitted.key].ended)
    assert gathered.records[held.key].ended.error == "" and gathered.records[admitted.key].ended.error == "cancelled"
    assert engine.ledger.num_available == engine.num_blocks and engine.load_report().num_waiting_tokens == 0

    engine.runner.model.before_forward = lambda batch: None
    again = engine_request("again", toy_prompt(90, 1), 20)
    engine.submit(again)
    gathered.wait(lambda records: records[again.key].ended is not None)
    assert gathered.records[again.key].answer() == toy_answer(again)


def test_what_a_step_gave_out_before_it_crashed_is_not_lost():
    engine = toy_engine()
    gone, running = engine_request("g", toy_prompt(40)), engine_request("r", toy_prompt(40, 2))
    done = engine_request("d", toy_prompt(9), max_tokens=2)
    engine.submit(done)
    engine.submit(running)
    records = Collector()
    records.take(engine.step())
    engine.admission.admit(gone)
    engine.cancel(gone.key)
    processor = engine.output_processor
    take, processor._finish = processor._finish, None  # crashes behind the last token of `done`
    with pytest.raises(TypeError):
        engine.step()
    processor._finish = take
    records.take(engine.fail("crashed"))
    errors = {key.request_id: record.ended.error for key, record in records.items()}
    assert errors == {"g": "cancelled", "d": "failed_together", "r": "failed_together"}
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks and not engine.has_work()


def test_what_a_step_gave_out_is_given_out_once(monkeypatch):
    """The next step fails at its very beginning."""
    engine, request, records = toy_engine(), engine_request("a", toy_prompt(40)), Collector()
    loop = EngineLoop(engine, records.take)
    engine.submit(request)
    records.take(loop._step())

    def hit(name):
        raise FailpointError(name)

    monkeypatch.setattr(failpoints, "hit", hit)
    records.take(loop._step())
    assert len(records[request.key].tokens[0]) == 1 and records[request.key].ended.error == "failed"
    assert engine.ledger.num_available == engine.num_blocks


def test_a_command_that_fails_ends_its_key_alone():
    engine = toy_engine()
    bad, good = engine_request("bad", toy_prompt(40)), engine_request("good", toy_prompt(40, 2))
    source = toy_engine()
    acceptance = source.admission.accept(bad)
    firsts = [output for output in source.step() if isinstance(output, PrefillDone)]
    engine.admission.admit(bad)
    copy_kv(source, acceptance.blocks, engine, engine.admission.set_aside(bad.key, 40))
    engine.admission.verify(bad.key, 40)
    engine.admission.fetch_settled(bad.key)
    engine.admission.start(bad.key, going_on(firsts[0]) * 3)
    # Crashes where a second choice gets its tail.
    engine.scheduler.copies = engine.scheduler.copies._replace(block=None)
    engine.submit(good)
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    assert set(engine.admission.groups) == {good.key}
    assert engine.load_report().num_running == 1


def test_a_fault_of_nobodys_ends_every_key():
    engine = toy_engine()
    for name in "ab":
        engine.admission.admit(engine_request(name, toy_prompt(40)))
    schedule, engine.scheduler.schedule = engine.scheduler.schedule, None
    with pytest.raises(TypeError):
        engine.step()
    engine.scheduler.schedule = schedule
    assert [output.error for output in engine.fail("crashed")] == ["failed_together"] * 2
    engine.check_integrity()
    assert engine.ledger.num_available == engine.num_blocks and not engine.admission.groups


def test_what_waits_for_blocks_is_woken_when_they_come(loop_of):
    """Only a lease's end makes room: the waiting request runs although nothing was submitted."""
    engine, gathered = toy_engine(num_blocks=16, max_model_len=256, max_num_seqs=2), Gathered()
    loop_of(engine, gathered)
    held = engine_request("held", toy_prompt(120), max_tokens=4)
    engine.admission.accept(held)
    gathered.wait(lambda records: records[held.key].first is not None)
    growing = engine_request("growing", toy_prompt(40, 2), max_tokens=180)
    engine.submit(growing)
    until(lambda: engine.load_report().num_waiting == 1)
    engine.check_integrity()
    engine.admission.release_lease(held.key)
    gathered.wait(lambda records: records[growing.key].ended is not None)
    assert gathered.records[growing.key].answer() == toy_answer(growing)
    assert gathered.records[growing.key].ended.report.num_preemptions == 1


def test_deadline_of_an_idle_loop(loop_of):
    engine, gathered = toy_engine(), Gathered()
    loop_of(engine, gathered)
    request = engine_request("a", toy_prompt(10), deadline=time.monotonic() + 0.1)
    engine.admission.admit(request)
    gathered.wait(lambda records: records[request.key].ended is not None)
    assert gathered.records[request.key].ended.error == "deadline"


def test_two_loops_hand_over(loop_of):
    prefill, decode = toy_engine(max_num_batched_tokens=68), toy_engine()
    firsts, rest = Gathered(), Gathered(first_index=1)
    loop_of(prefill, firsts)
    loop_of(decode, rest)
    requests = [engine_request(f"r{i}", toy_prompt(150, i), 40, temperature=1.0, seed=i, n=1 + i % 2) for i in range(4)]
    for request in requests:
        decode.admission.admit(request)
        acceptance = prefill.admission.accept(request)
        firsts.wait(lambda records, key=request.key: records[key].first is not None)
        refs = decode.admission.set_aside(request.key, 150)
        copy_kv(prefill, acceptance.blocks, decode, refs)
        decode.admission.verify(request.key, 150)
        decode.admission.fetch_settled(request.key)
        decode.admission.start(request.key, going_on(firsts.records[request.key].first))
        prefill.admission.release_lease(request.key)
    keys = [request.key for request in requests]
    rest.wait(lambda records: all(records[key].ended is not None for key in keys))
    firsts.wait(lambda records: all(records[key].ended is not None for key in keys))
    for request in requests:
        done = firsts.records[request.key].first.first_tokens
        tokens = {first.choice: [first.token_id, *rest.records[request.key].tokens[first.choice]] for first in done}
        assert tokens == {choice: answer for choice, (answer, _) in toy_answer(request).items()}
    for engine in (prefill, decode):
        engine.check_integrity()
        assert engine.ledger.num_available == engine.num_blocks


def test_stop_leaves_the_keys_and_is_idempotent():
    engine, gathered = toy_engine(), Gathered()
    loop = EngineLoop(engine, gathered)
    loop.start()
    request = engine_request("a", toy_prompt(10), max_tokens=400)
    engine.submit(request)
    gathered.wait(lambda records: request.key in records)
    loop.stop()
    loop.stop()
    assert not loop.is_alive
    assert not any(isinstance(record.ended, RequestEnded) for record in gathered.records.values())
    engine.cancel(request.key)
    assert engine.step()[0].error == "cancelled"
    engine.check_integrity()


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_device_is_told_and_a_failed_step_is_not(monkeypatch, lost):
    """A sticky CUDA error fails every later call: a loop that continued would refuse all requests, as the least loaded
    worker."""
    engine, gathered, told = toy_engine(), Gathered(), []
    monkeypatch.setattr("baton.engine.loop.is_lost", lambda device: lost)
    step, failing = engine.step, [RuntimeError("CUDA error: an illegal memory access\nwas encountered")]
    monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(failing.pop()) if failing else step())
    loop = EngineLoop(engine, gathered, told.append)
    loop.start()
    until(lambda: not failing)
    request = engine_request("a", toy_prompt(10), max_tokens=4)
    engine.submit(request)
    gathered.wait(lambda records: records[request.key].ended is not None if request.key in records else False)
    loop.stop()
    assert told == (["CUDA error: an illegal memory access was encountered"] if lost else [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_step_that_cannot_be_ended_is_told(monkeypatch):
    """The thread ended, and its process stayed, without a use."""
    engine, told = toy_engine(), []
    loop = EngineLoop(engine, Gathered(), on_broken=told.append)
    monkeypatch.setattr(engine.runner.launcher, "run", None)
    engine.submit(engine_request("a", toy_prompt(10), max_tokens=4))
    monkeypatch.setattr(engine.ledger, "release", None)
    loop.start()
    until(lambda: told or not loop.is_alive)
    assert told == ["TypeError: 'NoneType' object is not callable"]
    loop.stop()


class StickyDevice:
    """From the `at`th launch on, every call of the process fails: launches, and the wait that a probe is."""

    def __init__(self, monkeypatch, engine, at: int):
        self._at, self._run, self.num_launches = at, engine.runner.launcher.run, 0
        monkeypatch.setattr(engine.runner.launcher, "run", self.run)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        # The engine's own tensors are on the CPU.
        monkeypatch.setattr("baton.engine.loop.is_lost", lambda device: is_lost(torch.device("cuda")))

    def run(self, *given):
        self.num_launches += 1
        self.synchronize(None)
        return self._run(*given)

    def synchronize(self, device) -> None:
        if self.num_launches >= self._at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_is_lost_at_a_step_is_told_at_that_step(monkeypatch):
    """Before anything else is launched, or any other request is failed by it."""
    engine, gathered = toy_engine(), Gathered()
    device, told, ended = StickyDevice(monkeypatch, engine, at=4), [], threading.Event()

    def end_process(reason: str) -> None:
        told.append((reason, device.num_launches))
        loop._stopping.set()
        ended.set()

    loop = EngineLoop(engine, gathered, end_process)
    request = engine_request("a", toy_prompt(10), max_tokens=20)
    engine.submit(request)
    loop.start()
    assert ended.wait(10)
    loop.stop()
    assert told == [("CUDA error: an illegal memory access was encountered", 4)]
    assert len(gathered.records[request.key].tokens[0]) == 3, "the tokens of the steps before"


def test_a_cpu_is_never_lost():
    assert not is_lost(torch.device("cpu"))


def test_a_gpu_that_fails_to_synchronize_is_lost(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert is_lost(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_lost(torch.device("cuda"))
