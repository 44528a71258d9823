"""Drain commands to all workers at once, again and again, and wrong ones, while requests run: the answered text is
right, what was not says why, and the stack serves again by itself."""

import threading
import time

import grpc
import pytest

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from tests.e2e.recovery.waits import await_workers
from tests.support.client import Client, read_error
from tests.support.observe.probe import Probe
from tests.support.pace import patience

OPTIONS = ("--num-blocks", "160", "--threads", "1", "--drain-grace-s", "0.3", "--lease-ttl-s", "2")
ANSWER = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
NUM_CLIENTS = 3


@pytest.fixture(scope="module")
def stack(run_stack):
    with run_stack("drained", options=OPTIONS, num_prefill=1, num_decode=2) as stack:
        yield stack


GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""A process that ends refuses new calls, and its server cancels the one that is open."""


def ask_to_drain(target: str, **fields) -> grpc.StatusCode | None:
    """Return the answer's status; None if the process is gone already or restarts."""
    with grpc.insecure_channel(target) as channel:
        try:
            worker_pb2_grpc.WorkerStub(channel).Drain(pb.DrainRequest(**fields), timeout=patience(30))
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            return None if error.code() in GONE else error.code()


@pytest.mark.parametrize("num_rounds", [1, pytest.param(6, marks=pytest.mark.long)])
def test_everybody_is_drained_again_and_again(stack, prompts, num_rounds):
    """A drain of each into its own role ends what runs there after the grace, and restarts the process."""
    prompt = prompts(150)
    client = Client(stack.target)
    expected = client.generate(prompt, **ANSWER).token_ids
    stop, answers, refusals = threading.Event(), [], []

    def keep_asking() -> None:
        mine = Client(stack.target)
        while not stop.is_set():
            try:
                answers.append(mine.generate(prompt, **ANSWER).token_ids)
            except grpc.RpcError as error:
                refusals.append(read_error(error))
                stop.wait(0.1)
        mine.close()

    asking = [threading.Thread(target=keep_asking) for _ in range(NUM_CLIENTS)]
    for thread in asking:
        thread.start()
    roles = [(stack.address[process.name], role) for role in ("prefill", "decode") for process in getattr(stack, role)]
    try:
        for _ in range(num_rounds):
            epochs = {target: describe(target).epoch for target, _ in roles}
            for target, role in roles:
                told = [ask_to_drain(target, next_role=role, grace_s=0.2)]
                told += [ask_to_drain(target, next_role=role) for _ in range(3)]
                assert set(told) <= {grpc.StatusCode.OK, None} and told[0] is grpc.StatusCode.OK
                wrong = ask_to_drain(target, next_role="prefill" if role == "decode" else "decode")
                assert wrong in (grpc.StatusCode.FAILED_PRECONDITION, None)
                garbage = [
                    dict(next_role="?" * 5000),
                    dict(grace_s=-1),
                    dict(grace_s=float("nan")),
                    dict(grace_s=1e300),
                ]
                for fields in garbage:
                    assert ask_to_drain(target, **fields) in (grpc.StatusCode.INVALID_ARGUMENT, None)
            for target, role in roles:
                await_anew(target, epochs[target], role)
            for gateway in stack.gateways:
                await_workers(stack, gateway, 60)
    finally:
        stop.set()
        for thread in asking:
            thread.join(60)
    assert answers and all(answer == expected for answer in answers)
    for said in refusals:  # that it would come too late, too: one worker of the role is left, or none
        assert said.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED) and said.reason, said
    assert [client.generate(prompt, **ANSWER).token_ids for _ in range(5)] == [expected] * 5
    client.close()
    for target, _ in roles:
        probe = Probe(target)
        probe.wait_idle(timeout_s=20)
        probe.close()
    assert all(process.alive for process in stack.processes)


def describe(target: str) -> pb.Hello:
    with grpc.insecure_channel(target) as channel:
        return worker_pb2_grpc.WorkerStub(channel).Describe(
            pb.DescribeRequest(), timeout=patience(30), wait_for_ready=True
        )


def await_anew(target: str, epoch: int, role: str) -> None:
    """Until another process answers there."""
    deadline = time.monotonic() + patience(90)
    while True:
        try:
            if (hello := describe(target)).epoch != epoch:
                assert list(hello.roles) == [role]
                return
        except grpc.RpcError as error:  # it went while it was asked, or is not back yet
            assert error.code() in (*GONE, grpc.StatusCode.DEADLINE_EXCEEDED), error
        assert time.monotonic() < deadline, f"{target} did not come back"
        time.sleep(0.05)
