"""Gateway and worker as one process: the same answers, and ends, drains and failures as of processes apart."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from tests.support.client import Client, make_request
from tests.support.pace import patience
from tests.support.process import ROOT, Process
from tests.support.stack import SLOW_STEPS, TogetherStack

BATON = str(Path(sys.executable).with_name("baton"))
PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def together(run_stack):
    with run_stack("together", TogetherStack) as stack:
        yield stack


def test_answers_are_those_of_processes_apart(together, local_client):
    client = Client(together.target)
    requests = [
        make_request(PROMPT, temperature=0.0, max_tokens=40, logprobs=2),
        make_request(PROMPT[7:], temperature=1.0, seed=3, n=2, max_tokens=40),
        make_request("quick brown fox", temperature=0.8, seed=5, top_p=0.9, max_tokens=12, presence_penalty=0.5),
        make_request(PROMPT, temperature=0.0, max_tokens=1),
    ] * 3
    ours, theirs = (each.generate_many(requests) for each in (client, local_client))
    client.close()
    assert [reply.outcome() for reply in ours] == [reply.outcome() for reply in theirs]


def test_between_the_two_nothing_goes_over_a_socket(together):
    (process,) = together.processes
    assert 'peer="this process"' in process.text()


def test_a_drain_of_the_worker_ends_the_process_when_what_runs_has_ended(model, fork_server, tmp_path):
    options = ("--num-blocks", "160", "--threads", "1")
    with TogetherStack(model, tmp_path, options=options, failpoints=True, fork_server=fork_server) as stack:
        (process,) = stack.processes
        address = process.argv[process.argv.index("--") :][4]
        client = Client(stack.target)
        with process.armed(SLOW_STEPS):
            stream = iter(client.stream(PROMPT, temperature=0.0, max_tokens=30, ignore_eos=True))
            num_tokens = len(next(stream).token_ids)
            with grpc.insecure_channel(address) as channel:
                worker_pb2_grpc.WorkerStub(channel).Drain(pb.DrainRequest(stay_away=True), timeout=patience(10))
            assert num_tokens + sum(len(message.token_ids) for message in stream) == 30
        client.close()
        assert process.wait() == 3, "it stays away"
        assert not stack.complaints()


@pytest.fixture(scope="module")
def up(model, tmp_path_factory):
    argv = [BATON, "up", "--together", "--model", str(model), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    argv += ["--num-blocks", "160", "--threads", "1"]
    env = {"OMP_NUM_THREADS": "1", "BATON_FAILPOINTS": SLOW_STEPS}
    process = Process("up", argv, tmp_path_factory.mktemp("up"), env)
    try:
        yield process
    finally:
        process.stop(30)


def child(up: Process) -> psutil.Process | None:
    found = [each for each in psutil.Process(up.pid).children() if "baton.cli.launch.together" in each.cmdline()]
    return found[0] if found else None


def test_up_keeps_one_process_and_the_doctor_finds_it_healthy(up):
    target = up.ready(90)["grpc"]
    assert len(psutil.Process(up.pid).children()) == 1
    argv = [BATON, "doctor", "--target", target]
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    before = child(up)
    before.kill()
    client, deadline = Client(target), time.monotonic() + patience(60)
    while True:
        try:
            assert len(client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True).token_ids) == 4
            break
        except grpc.RpcError as error:
            assert time.monotonic() < deadline, error
            time.sleep(0.2)
    client.close()
    assert child(up).pid != before.pid


def test_a_signal_lets_what_runs_end(up):
    client = Client(up.ready(90)["grpc"])
    stream = iter(client.stream(PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True))
    num_tokens = len(next(stream).token_ids)
    os.kill(up.pid, signal.SIGTERM)
    assert num_tokens + sum(len(message.token_ids) for message in stream) == 60
    client.close()
    assert up.wait() == 0


@pytest.mark.parametrize(
    "gateway, worker, status, words",
    [
        (["--listen", "{taken}"], [], 1, "gateway: {taken} is in use"),
        ([], ["--listen", "{taken}"], 1, "decode_worker: {taken} is in use"),
        (["--split", "perhaps"], [], 2, "--split"),
    ],
)
def test_a_failed_start_is_one_line(model, gateway, worker, status, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        argv = ["--model", str(model), "--listen", "127.0.0.1:0", "--log-level", "error", *gateway, "--"]
        argv += ["--model", str(model), "--listen", "127.0.0.1:0", "--num-blocks", "160", *worker]
        argv = [each.format(taken=address) for each in [sys.executable, "-m", "baton.cli.launch.together", *argv]]
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=patience(90))
    assert ran.returncode == status and ran.stdout == ""
    assert words.format(taken=address) in ran.stderr.splitlines()[-1] and "Traceback" not in ran.stderr
