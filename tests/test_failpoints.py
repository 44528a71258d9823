"""Failpoints: nothing without the variable, exactly what it says with it."""

import os
import subprocess
import sys

import pytest

from baton import failpoints

PROGRAM = "from baton import failpoints\nfor i in range(4):\n    failpoints.hit('engine.step')\n    print(i, flush=True)\n"


def run(text: str) -> subprocess.CompletedProcess:
    env = {**os.environ, failpoints.VARIABLE: text}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)


def test_nothing_without_the_variable():
    assert run("").stdout.split() == ["0", "1", "2", "3"]
    assert failpoints._make("") is failpoints._nothing


def test_kill_on_the_third_pass():
    ended = run("engine.step=kill@3")
    assert ended.returncode == -9 and ended.stdout.split() == ["0", "1"]


def test_fail_raises_where_it_stands():
    ended = run("engine.step=fail@2")
    assert ended.stdout.split() == ["0"] and "FailpointError" in ended.stderr


@pytest.mark.parametrize("text", ["nowhere=kill", "engine.step=explode", "engine.step=sleep", "engine.step=kill:3"])
def test_a_text_that_cannot_be_read_ends_the_process(text):
    ended = run(text)
    assert ended.returncode == 1 and f"cannot read {text!r}" in ended.stderr


def test_a_file_is_read_again(tmp_path):
    path = tmp_path / "failpoints"
    board = failpoints._Board(f"@{path}")
    board.hit("engine.step")
    path.write_text("engine.step=fail\n")
    with pytest.raises(failpoints.FailpointError):
        board.hit("engine.step")
    path.unlink()
    board.hit("engine.step")
