"""One worker of each role, killed again and again: requests wait for the next life, or a worker of the other role
stands in, and none fails."""

import itertools
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.support.client import Client, read_error
from tests.support.process import Process
from tests.support.stack import Stack

OPTIONS = ("--num-blocks", "160", "--threads", "1")
ANSWER = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
NUM_CLIENTS = 3
STEPS = "engine.step=sleep:0.01"  # so that starting takes the processor, and not who asks
KILL_EVERY_S, NUM_KILLS = 8.0, 12


class Asking:
    """Clients that ask one after the other until the block ends, and what they got."""

    def __init__(self, target: str, prompt: list[int]):
        self.answers: list[list[int]] = []
        self.failures: list[object] = []
        self._target, self._prompt, self._stop = target, prompt, threading.Event()

    def check(self, expected: list[int]) -> None:
        assert not self.failures, self.failures[:3]
        assert all(answer == expected for answer in self.answers)

    def await_more(self, num: int) -> None:
        """Wait until so many more are answered, or one has failed."""
        wanted = len(self.answers) + num
        while len(self.answers) < wanted and not self.failures:
            time.sleep(0.05)

    @contextmanager
    def running(self) -> Iterator[None]:
        asking = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]
        for thread in asking:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in asking:
                thread.join(60)

    def _ask(self) -> None:
        client = Client(self._target)
        while not self._stop.is_set():
            try:
                self.answers.append(client.generate(self._prompt, **ANSWER).token_ids)
            except grpc.RpcError as error:
                self.failures.append(read_error(error))
        client.close()


def of_today(stack: Stack, name: str) -> Process:
    return next(process for process in stack.processes if process.name == name)


def expected_of(stack: Stack, prompt: list[int]) -> list[int]:
    client = Client(stack.target)
    try:
        return client.generate(prompt, **ANSWER).token_ids
    finally:
        client.close()


def test_no_request_fails_while_the_only_worker_starts_again(model, fork_server, tmp_path, prompts):
    prompt = prompts(150)
    with Stack(model, tmp_path, num_prefill=0, options=OPTIONS, fork_server=fork_server) as stack:
        expected, asking = expected_of(stack, prompt), Asking(stack.target, prompt)
        with asking.running():
            worker = of_today(stack, "decode0")
            worker.kill()
            stack.restart(worker)
            asking.await_more(2 * NUM_CLIENTS)
    asking.check(expected)


def test_the_other_role_stands_in(model, fork_server, tmp_path, prompts):
    """Answers go on before the killed worker is started again."""
    prompt = prompts(150)
    options = {"options": OPTIONS, "gateway_options": ["--stand-in", "--split=always"], "fork_server": fork_server}
    with Stack(model, tmp_path, failpoints=True, **options) as stack, stack.armed(STEPS):
        expected, asking = expected_of(stack, prompt), Asking(stack.target, prompt)
        with asking.running():
            for name in ("decode0", "prefill0"):
                worker = of_today(stack, name)
                worker.kill()
                asking.await_more(2 * NUM_CLIENTS)
                stack.restart(worker).arm(STEPS)
                asking.await_more(2 * NUM_CLIENTS)
        with urllib.request.urlopen(f"http://{stack.gateways[0].ready()['admin']}/metrics", timeout=10) as page:
            routes = [line for line in page.read().decode().splitlines() if line.startswith("baton_routes_total")]
    asking.check(expected)
    assert any('reason="stand_in"' in line for line in routes), routes


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--stand-in",)], ids=["waiting", "standing in"])
def test_a_kill_every_few_seconds(model, tmp_path, prompts, options):
    prompt = prompts(600)
    with Stack(model, tmp_path, options=OPTIONS, gateway_options=options) as stack:
        expected, asking = expected_of(stack, prompt), Asking(stack.target, prompt)
        with asking.running():
            for name in itertools.islice(itertools.cycle(("decode0", "prefill0")), NUM_KILLS):
                started_at = time.monotonic()
                worker = of_today(stack, name)
                worker.kill()
                stack.restart(worker)
                asking.await_more(2 * NUM_CLIENTS)  # what two kills hit is refused as poison
                time.sleep(max(0.0, started_at + KILL_EVERY_S - time.monotonic()))
    asking.check(expected)
    assert len(asking.answers) > NUM_KILLS
