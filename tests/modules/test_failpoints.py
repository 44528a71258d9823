"""Failpoints: nothing without the variable, exactly its actions with it."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from baton import failpoints

PROGRAM = """
from baton import failpoints
for i in range(4):
    failpoints.hit('engine.step')
    failpoints.hit('engine.batch', [10, 20 + i])
    print(i, flush=True)
"""


def run(text: str) -> subprocess.CompletedProcess:
    env = {**os.environ, failpoints.VARIABLE: text}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)


def test_nothing_without_the_variable():
    ended = run("")
    assert ended.stdout.split() == ["0", "1", "2", "3"] and not ended.stderr
    assert failpoints._board is None


@pytest.mark.parametrize("text", ["engine.step=kill@3", "engine.batch[22]=kill", "engine.batch[10]=kill@3"])
def test_kill_on_the_third_pass(text):
    ended = run(text)
    assert ended.returncode == -signal.SIGKILL and ended.stdout.split() == ["0", "1"]
    assert ended.stderr == f"failpoint {text.split('=')[0].split('[')[0]}: kill\n"


def test_a_number_that_never_passes():
    assert run("engine.batch[30]=kill").stdout.split() == ["0", "1", "2", "3"]


def test_fail_raises_where_it_stands():
    ended = run("engine.step=fail@2")
    assert ended.stdout.split() == ["0"] and "FailpointError" in ended.stderr


@pytest.mark.parametrize(
    "text",
    ["nowhere=kill", "engine.step=explode", "engine.step=sleep", "engine.step=kill:3", "engine.step", "engine.step[x]=kill",
     "engine.step=kill@", "engine.step=sleep:"],
)  # fmt: skip
def test_a_text_that_cannot_be_read_ends_the_process(text):
    ended = run(text)
    assert ended.returncode == 1 and f"cannot read {text!r}" in ended.stderr


def test_a_clock_is_off():
    board = failpoints._Board("lease.clock=skew:-3600@2")
    assert [board.hit("lease.clock") for _ in range(3)] == [0.0, -3600.0, 0.0]


def test_of_several_processes_one(tmp_path):
    token = tmp_path / "token"
    token.touch()
    first, second = (failpoints._Board(f"engine.step=fail@2{token}") for _ in range(2))
    for board in (first, second):
        board.hit("engine.step")
    with pytest.raises(failpoints.FailpointError):
        second.hit("engine.step")
    first.hit("engine.step")
    assert not token.exists()


def test_a_file_is_read_again(tmp_path):
    path = tmp_path / "failpoints"
    board = failpoints._Board(f"@{path}")
    board.hit("engine.step")
    path.write_text("engine.step=fail\n")
    with pytest.raises(failpoints.FailpointError):
        board.hit("engine.step")
    path.unlink()
    board.hit("engine.step")


def test_who_would_pass_less_often_can_ask(monkeypatch):
    assert not failpoints.is_armed("engine.step")
    monkeypatch.setattr(failpoints, "_board", failpoints._Board("engine.step=sleep:0.1"))
    assert failpoints.is_armed("engine.batch", "engine.step") and not failpoints.is_armed("engine.batch")


def test_a_sleep_holds_up_its_task_and_not_the_event_loop(monkeypatch):
    monkeypatch.setattr(failpoints, "_board", failpoints._Board("transfer.landed=sleep:0.2, engine.step=fail"))

    async def run() -> list[str]:
        order = []

        async def pass_by() -> None:
            await failpoints.hit_in_task("transfer.landed")
            order.append("passed")

        task = asyncio.create_task(pass_by())
        await asyncio.sleep(0)
        order.append("others run")
        await task
        await failpoints.hit_in_task("prefill.done")
        with pytest.raises(failpoints.FailpointError):
            await failpoints.hit_in_task("engine.step")
        return order

    assert asyncio.run(run()) == ["others run", "passed"]


def test_a_file_that_is_replaced_at_once_is_read_again(tmp_path):
    path = tmp_path / "failpoints"
    board = failpoints._Board(f"@{path}")
    for seconds in (1.0, 2.0, 3.0, 4.0):
        other = tmp_path / "other"
        other.write_text(f"lease.clock=skew:{seconds}")
        os.utime(other, ns=(0, 0))
        os.replace(other, path)
        assert board.hit("lease.clock") == seconds
