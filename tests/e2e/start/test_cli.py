"""The `baton` command as a user runs it: up, generate, restart of a dead worker, drain at the end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from grpc import RpcError

from tests.support.client import Client
from tests.support.pace import patience
from tests.support.process import ROOT, Process
from tests.support.stack import SLOW_STEPS

BATON = str(Path(sys.executable).with_name("baton"))


def run(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([BATON, *options], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def up(model, tmp_path_factory):
    argv = [BATON, "up", "--model", str(model), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    argv += ["--num-blocks", "160", "--threads", "1", "--decode.max-num-seqs", "8"]
    # Slow steps: SIGTERM must find the stream running.
    env = {"OMP_NUM_THREADS": "1", "BATON_FAILPOINTS": SLOW_STEPS}
    process = Process("up", argv, tmp_path_factory.mktemp("up"), env)
    try:
        yield process
    finally:
        process.stop(30)


@pytest.fixture(scope="module")
def target(up) -> str:
    ready = up.ready(90)
    assert {"grpc", "admin", "pid"} <= ready.keys()
    assert int(ready["pid"]) == up.pid
    return ready["grpc"]


def test_generate_prints_the_completion(target):
    ran = run("generate", "quick brown", "--target", target, "--max-tokens", "8", "--temperature", "0")
    assert ran.returncode == 0, ran.stderr
    client = Client(target)
    assert client.generate("quick brown", max_tokens=8, temperature=0.0).text.strip() in ran.stdout
    client.close()


@pytest.mark.parametrize("command", [["generate", "quick brown", "--max-tokens", "60"], ["top", "--interval", "0.05"]])
def test_a_reader_who_has_seen_enough_ends_it_quietly(target, command):
    with subprocess.Popen(
        [BATON, *command, "--target", target], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert (process.wait(patience(60)), process.stderr.read()) == (0, b"")


def test_generate_json(target):
    options = ("--target", target, "--max-tokens", "8", "--temperature", "1.0", "--seed", "7", "--json")
    first, second = (json.loads(run("generate", "quick brown", *options).stdout) for _ in range(2))
    assert first["text"] == second["text"]


def test_generate_under_a_schema(target, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}')
    options = ("--target", target, "--temperature", "0", "--schema", str(schema))
    ran = run("generate", "quick brown", *options)
    assert ran.returncode == 0, ran.stderr
    assert 1 <= len(json.loads(ran.stdout)) <= 2
    schema.write_text('{"minimun": 1}')
    ran = run("generate", "quick brown", *options)
    assert ran.returncode == 1 and "constraint.json_schema: /minimun: is no keyword" in ran.stderr
    ran = run("generate", "quick brown", "--schema", str(tmp_path / "none.json"))
    assert ran.returncode == 2 and "none.json: No such file" in ran.stderr


def test_generate_without_a_server():
    ran = run("generate", "x", "--target", "127.0.0.1:9", "--max-tokens", "1")
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert "127.0.0.1:9" in ran.stderr


def test_generate_that_is_refused(target):
    ran = run("generate", "x", "--target", target, "--max-tokens", "0")
    assert ran.returncode == 1 and "max_tokens" in ran.stderr and "Traceback" not in ran.stderr


def test_wrong_commands_and_options_exit_2():
    for options in ((), ("no-such-command",), ("generate",), ("up", "--no-such-option", "1")):
        ran = run(*options)
        assert ran.returncode == 2 and ran.stderr.strip(), options


def test_a_dead_worker_is_restarted_and_joins(up, target):
    """kill -9 of a decode worker: it comes back in a new process (and epoch), and requests are answered again."""
    worker = _child(up.pid, "decode_worker")
    worker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + patience(60)
    client = Client(target)
    while True:
        try:
            reply = client.generate("quick brown fox", max_tokens=4, temperature=0.0, ignore_eos=True, timeout=10)
            break
        except RpcError as error:
            assert time.monotonic() < deadline, error
            time.sleep(0.2)
    client.close()
    assert len(reply.token_ids) == 4
    while (reborn := _child(up.pid, "decode_worker")) is None or reborn.pid == worker.pid:
        assert time.monotonic() < deadline, "no new decode worker"
        time.sleep(0.1)


def test_drain_says_what_the_keeper_does(up, target):
    worker = _child(up.pid, "prefill_worker")
    address = worker.cmdline()[worker.cmdline().index("--listen") + 1]
    ran = run("drain", address)
    assert ran.returncode == 0 and "`baton up` starts it again now (--stay-away prevents that)" in ran.stdout
    deadline = time.monotonic() + patience(60)
    while run("drain", address, "--stay-away").returncode != 0:
        assert time.monotonic() < deadline, "it was not started again"
    while "was drained and stays away" not in up.text():
        assert time.monotonic() < deadline, up.text()
        time.sleep(0.1)
    assert _child(up.pid, "prefill_worker") is None


def test_sigterm_drains(up, target):
    """A running stream is finished, then everything goes: exit 0, no process left."""
    client = Client(target)
    stream = client.stream("quick brown fox jumps", max_tokens=60, temperature=0.0, ignore_eos=True)
    token_ids = list(next(stream).token_ids)
    children = psutil.Process(up.pid).children(recursive=True)
    os.kill(up.pid, signal.SIGTERM)
    for message in stream:
        token_ids += message.token_ids
    client.close()
    assert len(token_ids) == 60
    assert up.wait(30) == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert "Traceback" not in up.text()


def _child(pid: int, module: str) -> psutil.Process | None:
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if module in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue
    return None
