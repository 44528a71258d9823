"""One worker of each role, killed again and again: requests wait for the next life, and none fails."""

import threading
import time

import grpc
import pytest

from tests.support.client import Client, read_error
from tests.support.stack import Stack

OPTIONS = ("--num-blocks", "160", "--threads", "1")
ANSWER = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
NUM_CLIENTS = 3


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_no_request_fails_while_the_only_worker_starts_again(model, tmp_path, prompts, num_prefill):
    prompt = prompts(150)
    with Stack(model, tmp_path, num_prefill=num_prefill, options=OPTIONS) as stack:
        client = Client(stack.target)
        expected = client.generate(prompt, **ANSWER).token_ids
        stop, answers, failures = threading.Event(), [], []

        def keep_asking() -> None:
            mine = Client(stack.target)
            while not stop.is_set():
                try:
                    answers.append(mine.generate(prompt, **ANSWER).token_ids)
                except grpc.RpcError as error:
                    failures.append(read_error(error))
            mine.close()

        asking = [threading.Thread(target=keep_asking) for _ in range(NUM_CLIENTS)]
        for thread in asking:
            thread.start()
        for victim in (*stack.decode, *stack.prefill, *stack.decode):
            num_before = len(answers)
            current = next(process for process in stack.processes if process.name == victim.name)
            current.kill()
            stack.restart(current)
            while len(answers) < num_before + 2 * NUM_CLIENTS and not failures:
                time.sleep(0.05)
        stop.set()
        for thread in asking:
            thread.join(60)
        client.close()
    assert not failures, failures[:3]
    assert all(answer == expected for answer in answers)
