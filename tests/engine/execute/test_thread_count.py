"""The number of threads of short steps is the faster of two, as measured, and changes no bit."""

import pytest
import torch

from baton import system
from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.core.shared_cores import SharedCores
from baton.engine.engine import Engine
from baton.engine.execute import multi_step, thread_count
from baton.engine.execute.thread_count import LAST_INTERVAL, MAX_ROWS, ThreadCount
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import save_tiny


@pytest.fixture(autouse=True)
def threads_come_back():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Machine:
    """Takes, for a call of steps, the seconds that `cost` says of threads and rows."""

    def __init__(self, monkeypatch, num_threads: int, cost):
        self.now, self.cost, self.count = 0.0, cost, ThreadCount(num_threads)
        monkeypatch.setattr(thread_count.time, "perf_counter", lambda: self.now)

    def call(self, num_rows: int, num_steps: int = 1) -> int:
        """Return by how many threads it was computed."""
        self.count.begin(num_rows)
        used = torch.get_num_threads()
        self.now += num_steps * self.cost(used, num_rows)
        self.count.end(num_steps)
        return used


def test_the_faster_number_is_found_for_each_number_of_rows(monkeypatch):
    machine = Machine(monkeypatch, 4, lambda threads, rows: 1.0 if (threads == 3) == (rows < 8) else 1.5)
    used = {1: [], 16: []}
    for _ in range(400):
        for rows, each in used.items():
            each.append(machine.call(rows))
    assert used[1][-200:].count(3) > 190 and used[16][-200:].count(4) > 190


def test_the_slower_number_is_tried_ever_more_seldom(monkeypatch):
    machine = Machine(monkeypatch, 2, lambda threads, rows: 2.0 / threads)
    used = [machine.call(1) for _ in range(20_000)]
    assert used[:100].count(1) > 0, "it was tried"
    assert used[10_000:].count(1) <= 3 * (10_000 // LAST_INTERVAL + 1)


def test_the_thread_count_follows_a_machine_that_changes(monkeypatch):
    slow = {"threads": 2}
    machine = Machine(monkeypatch, 2, lambda threads, rows: 1.5 if threads == slow["threads"] else 1.0)
    assert [machine.call(1) for _ in range(300)][-20:] == [1] * 20
    slow["threads"] = 1
    assert [machine.call(1) for _ in range(2 * LAST_INTERVAL)][-20:] == [2] * 20


def test_a_call_of_several_steps_counts_by_the_step(monkeypatch):
    machine = Machine(monkeypatch, 2, lambda threads, rows: 1.0 if threads == 1 else 1.2)
    used = [machine.call(1, 8 if index % 3 else 1) for index in range(300)]
    assert used[-50:].count(1) > 45


def test_the_rows_of_a_long_step_count(monkeypatch):
    """Chunks of 40 to 60 rows take as long by the row, and with one thread fewer less."""
    machine = Machine(monkeypatch, 2, lambda threads, rows: rows * (1.0 if threads == 1 else 1.1))
    used = [machine.call(40 + 20 * (index % 2)) for index in range(400)]
    assert used[-50:].count(1) > 45


def test_long_steps_are_computed_by_all(monkeypatch):
    machine = Machine(monkeypatch, 2, lambda threads, rows: threads)
    assert {machine.call(MAX_ROWS + 1) for _ in range(200)} == {2}


def test_a_step_that_fails_leaves_nothing_behind(monkeypatch):
    machine = Machine(monkeypatch, 2, lambda threads, rows: 1.0)
    machine.call(1)
    machine.count.begin(1)
    machine.now += 100  # it raised, and passed nothing
    assert machine.call(MAX_ROWS + 1) == 2
    machine.call(1)
    assert {each for times in machine.count._choices[2, 1].times.values() for each in times} == {1.0}


def test_behind_a_call_all_threads_compute(monkeypatch):
    """Steps that are not chosen for, and whatever else its thread does."""
    machine = Machine(monkeypatch, 2, lambda threads, rows: threads)
    used = [(machine.call(1), torch.get_num_threads()) for _ in range(200)]
    assert {each for each, _ in used} == {1, 2} and {after for _, after in used} == {2}


def test_a_prompt_takes_the_cores_of_those_that_are_idle(monkeypatch, tmp_path):
    """Of four workers on eight cores; what is measured with one number of threads says nothing of another."""
    monkeypatch.setattr(system, "cores", lambda: list(range(8)))
    monkeypatch.setattr(system, "cpu_quota", lambda: None)
    machine = Machine(monkeypatch, 1, lambda threads, rows: 1.0)
    own, *others = (SharedCores(tmp_path) for _ in range(4))
    machine.count.share(own)
    assert machine.call(MAX_ROWS + 1) == 8 and machine.call(1) in (1, 2)
    others[0].claim(is_long=False)
    assert machine.call(MAX_ROWS + 1) == 6
    for each in others:
        each.claim(is_long=True)
    assert machine.call(MAX_ROWS + 1) == 2
    machine.count.rest()
    assert others[0].claim(is_long=True) == 4
    for each in (own, *others):
        each.close()


def test_an_engine_alone_has_the_threads_that_can_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "num_cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Engine.load(EngineConfig(save_tiny(tmp_path / "tiny", 256), block_size=16, num_blocks=16))
        assert engine.runner.threads.most == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_bits_are_those_of_one_thread(tmp_path, monkeypatch, dtype):
    """While the number changes with nearly every call."""
    monkeypatch.setattr(thread_count, "FIRST_INTERVAL", 1)
    monkeypatch.setattr(thread_count, "LAST_INTERVAL", 2)
    monkeypatch.setattr(multi_step, "BUDGET_NS", 0)
    folder, answers, used = save_tiny(tmp_path / "tiny", 256), [], set()
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        config = EngineConfig(model=folder, block_size=16, num_blocks=128, dtype=dtype, threads=num_threads)
        engine = Engine.load(config)
        begin = engine.runner.threads.begin

        def noted(num_rows: int) -> None:
            begin(num_rows)
            used.add(torch.get_num_threads())

        monkeypatch.setattr(engine.runner.threads, "begin", noted)
        requests = [engine_request(str(n), [n + 3, 7, 9] * (n + 1), 40, named=False, logprobs=3) for n in range(5)]
        records = run_to_end(engine, requests)
        answers.append([(records[each.key].answer(), records[each.key].logprobs) for each in requests])
    assert answers[0] == answers[1] and used == {1, 2, 3}
