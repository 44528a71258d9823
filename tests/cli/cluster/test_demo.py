"""`make demo`: the table adds up, and the whole run on the shipped model ends with status 0."""

import subprocess
import sys

import pytest

from baton.cli.cluster import demo
from baton.service.progress import PREFIX
from baton.v1 import inference_pb2 as pb
from tests.support.process import ROOT


def last_message(ttft_s: float) -> pb.GenerateResponse:
    last = pb.GenerateResponse(usage=pb.Usage(prompt_tokens=10, output_tokens=5))
    for index, (name, _) in enumerate(demo.PHASES):
        setattr(last.timing, name, 0.001 * (index + 1))
    last.timing.ttft_s = ttft_s
    return last


def test_phases_add_up():
    lines = list(demo.table(last_message(0.021)))
    assert [line.split()[0] for line in lines[1:7]] == [name for name, _ in demo.PHASES]
    assert sum(float(line.split()[1]) for line in lines[1:7]) == pytest.approx(21, abs=0.01)
    assert lines[7].split()[:3] == ["=", "ttft_s", "21.00"]


def test_phases_that_do_not_add_up_are_a_failure():
    with pytest.raises(demo.DemoError, match="ttft_s"):
        list(demo.table(last_message(0.022)))


def test_missing_model_is_one_line(tmp_path):
    argv = [sys.executable, "-m", "baton.cli.cluster.demo", "--model", str(tmp_path / "nowhere")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith(PREFIX))
    assert done.returncode == 1 and "nowhere" in line


def test_the_whole_run():
    argv = [sys.executable, "-m", "baton.cli.cluster.demo", "--max-tokens", "16"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert demo.PROMPT in done.stdout and "= ttft_s" in done.stdout and "Traceback" not in done.stderr
