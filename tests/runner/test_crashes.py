"""A process of a run that dies costs one test: the run names it, fails, runs everything else and ends."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tests.runner.file_scheduling import LastingFileScheduling
from tests.runner.inner_pytest import run_pytest

DIES = "import os, signal\n\ndef test_{}():\n    os.kill(os.getpid(), signal.SIGABRT)\n"
PASSES = "def test_{}():\n    pass\n"
FILES = {
    "test_a.py": PASSES.format(1) + PASSES.format(2),
    "test_b.py": PASSES.format("before") + DIES.format("dies") + PASSES.format("after") + PASSES.format("last"),
    "test_c.py": DIES.format("alone"),
    "test_d.py": PASSES.format(1),
}


def test_the_other_tests_run(tmp_path):
    ran = run_pytest(tmp_path, FILES, "-n1", "--dist=loadfile", "--no-loadscope-reorder", "--timeout=60")
    assert ran.returncode == 1 and "2 failed, 6 passed" in ran.stdout, ran.stdout
    for test in ("test_b.py::test_dies", "test_c.py::test_alone"):
        assert f"crashed while running '{test}'" in ran.stdout


class Process:
    """Of pytest-xdist, as its schedulers see one."""

    def __init__(self, scheduling: LastingFileScheduling, name: str):
        self.gateway, self.scheduling = SimpleNamespace(id=name), scheduling
        self.given, self.shutting_down = [], False
        scheduling.add_node(self)

    def send_runtest_some(self, indices):
        self.given += indices

    def shutdown(self):
        self.shutting_down = True

    def collect(self, tests: Sequence[str] = ("a.py::1", "a.py::2", "b.py::1", "b.py::2", "c.py::1")) -> None:
        self.scheduling.add_node_collection(self, list(tests))
        if self.scheduling.collection_is_completed:
            self.scheduling.schedule()

    def run(self) -> None:
        """All that it knows a next one of."""
        done = 0
        while done < len(self.given) - (not self.shutting_down):
            self.scheduling.mark_test_complete(self, self.given[done])
            done += 1


@pytest.fixture
def scheduling():
    config = SimpleNamespace(getvalue=lambda name: ["2*popen"], option=SimpleNamespace(loadscopereorder=False))
    return LastingFileScheduling(config, None)


def test_one_dies_while_the_one_in_the_place_of_another_collects(scheduling):
    first, second = Process(scheduling, "0"), Process(scheduling, "1")
    first.collect()
    second.collect()
    assert scheduling.remove_node(first) == "a.py::1"
    third = Process(scheduling, "2")
    assert scheduling.remove_node(second) == "b.py::1"
    fourth = Process(scheduling, "3")
    third.collect()
    fourth.collect()
    third.run()
    fourth.run()
    assert sorted(third.given + fourth.given) == [1, 3, 4] and scheduling.tests_finished


def test_one_dies_before_the_others_have_collected(scheduling):
    first, second = Process(scheduling, "0"), Process(scheduling, "1")
    first.collect()
    assert scheduling.remove_node(first) is None
    second.collect()
    assert not second.given
    third = Process(scheduling, "2")
    third.collect()
    second.run()
    third.run()
    assert sorted(second.given + third.given) == [0, 1, 2, 3, 4] and scheduling.tests_finished


def test_a_folder_whose_tests_share_a_stack_is_for_one_process(scheduling):
    first, second = Process(scheduling, "0"), Process(scheduling, "1")
    for each in (first, second):
        each.collect(
            [*(f"tests/faults/{name}.py::1" for name in ("load/test_a", "test_b")), "tests/c.py::1", "tests/d.py::1"]
        )
    first.run()
    second.run()
    assert first.given[:2] == [0, 1] and not {0, 1} & set(second.given)
