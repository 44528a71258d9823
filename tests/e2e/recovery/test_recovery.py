"""Real processes that die, are drained and change their roles in the middle of answers, greedy and sampled: each answer
is the undisturbed one, token for token, and in the end no block is held. More faults: tests/faults."""

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import grpc
import pytest

from baton.loadgen.summary import percentile
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.recovery.waits import await_workers, decoding_at
from tests.support.client import Client, Reply, add_messages, read_error, read_some
from tests.support.observe.probe import Probe
from tests.support.pace import patience
from tests.support.process import ROOT
from tests.support.stack import Stack

MAX_TOKENS = 50
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "choices": {"temperature": 0.9, "seed": 12, "n": 2},
    "logprobs": {"temperature": 0.8, "seed": 13, "logprobs": 1},
    "constrained": {
        "temperature": 1.0,
        "seed": 14,
        "constraint": pb.Constraint(json_schema='{"type": "array", "items": {"type": "integer"}, "minItems": 60}'),
    },
}
OPTIONS = ("--num-blocks", "160", "--threads", "1", "--drain-grace-s", "0.5", "--lease-ttl-s", "2")
GATEWAY_OPTIONS = ("--drain-grace-s", "0.3")
SLOW = "engine.step=sleep:0.05"  # what runs, runs for seconds


class PatientStack(Stack):
    """Every process runs under tests/support/launch/run_with_long_waits.py."""

    launcher = ("-m", "tests.support.launch.run_with_long_waits")


@pytest.fixture(scope="module")
def stack(run_stack):
    """Two of each; the gateways share nothing but the workers, and wait for what these offer, however busy the
    machine."""
    options = {"options": OPTIONS, "gateway_options": GATEWAY_OPTIONS, "stack_class": PatientStack}
    with run_stack("recovery", num_prefill=2, num_decode=2, num_gateways=2, **options) as stack:
        yield stack


@pytest.fixture(autouse=True)
def whole_again(stack):
    """Restart the processes that a test ended, and check that nothing is held."""
    yield
    settle(stack)


def settle(stack: Stack) -> None:
    for process in stack.processes:
        if not process.alive:
            process = stack.restart(process)
        if process in stack.workers:
            process.arm("")
    for gateway in stack.gateways:
        await_workers(stack, gateway)
    for process in stack.workers:
        probe = Probe(stack.address[process.name])
        try:
            probe.wait_idle(timeout_s=20)
        finally:
            probe.close()


@contextmanager
def client_of(stack: Stack, index: int = 0) -> Iterator[Client]:
    client = Client(stack.address[stack.gateways[index].name])
    try:
        yield client
    finally:
        client.close()


def fields_of(sampling: str, **more) -> dict:
    return {"max_tokens": MAX_TOKENS, "ignore_eos": True, **SAMPLINGS[sampling], **more}


def same(reply: Reply, expected: Reply) -> None:
    for index, choice in expected.choices.items():
        mine = reply.choices[index]
        assert mine.token_ids == choice.token_ids
        assert (mine.text, mine.finish_reason) == (choice.text, choice.finish_reason)
        assert mine.logprobs == choice.logprobs
    assert reply.usage.output_tokens == expected.usage.output_tokens
    assert reply.usage.prompt_tokens == expected.usage.prompt_tokens


def test_a_decode_worker_is_killed(stack, prompts):
    """With every kind of answer on it, each at another token."""
    many = [(prompts(100), fields_of(sampling)) for sampling in SAMPLINGS]
    with client_of(stack) as client:
        expected = [add_messages(Reply(), client.stream(prompt, **fields)) for prompt, fields in many]
        for process in stack.decode:
            process.arm(SLOW)
        calls = [client.stream(prompt, **fields) for prompt, fields in many]
        replies = [read_some(call, 1 + 4 * i) for i, call in enumerate(calls)]
        busy, *_ = decoding_at(stack)
        busy.kill()
        for call, reply, whole in zip(calls, replies, expected, strict=True):
            same(add_messages(reply, call), whole)


@pytest.mark.parametrize("is_parked", [True, pytest.param(False, marks=pytest.mark.long)], ids=["attach", "replay"])
def test_a_gateway_dies_and_its_clients_go_to_another(stack, prompts, is_parked):
    """All of them have sent their seed and counted their tokens."""
    many = [(prompts(80), fields_of(sampling)) for sampling in SAMPLINGS for _ in range(2)]
    with client_of(stack, 1) as other:
        expected = [add_messages(Reply(), other.stream(prompt, **fields)) for prompt, fields in many]
    for process in stack.decode:
        process.arm(f"engine.step=sleep:{patience(0.1):.3f}")  # none ends before all have begun
    with client_of(stack) as client:
        calls = [client.stream(prompt, request_id=f"many-{i}", **fields) for i, (prompt, fields) in enumerate(many)]
        replies = [read_some(call, 3) for call in calls]
        stack.gateways[0].kill()
        for call, reply in zip(calls, replies, strict=True):
            with pytest.raises(grpc.RpcError):
                for message in call:
                    add_messages(reply, [message])
    before = num_attached(stack.gateways[1])
    if not is_parked:  # another life of the workers knows nothing of it
        for process in stack.decode:
            process.kill()
            stack.restart(process)
        await_workers(stack, stack.gateways[1])
    with client_of(stack, 1) as other:
        calls = []
        for i, ((prompt, fields), reply) in enumerate(zip(many, replies, strict=True)):
            received = [len(reply.choices[index].token_ids) if index in reply.choices else 0
                        for index in range(fields.get("n", 1))]  # fmt: skip
            again = {**fields, "seed": reply.seed}
            calls.append(other.stream(prompt, request_id=f"many-{i}", resume_from=received, **again))
        for call, reply, whole in zip(calls, replies, expected, strict=True):
            same(add_messages(reply, call), whole)
    attached = num_attached(stack.gateways[1]) - before
    assert attached > 0 if is_parked else attached == 0


def num_attached(gateway) -> float:
    page = urlopen(f"http://{gateway.ready()['admin']}/metrics", timeout=10).read().decode()
    return float(re.search(r"^baton_attached_total\{.*\} (\S+)", page, re.MULTILINE)[1])


def test_a_gateway_that_is_told_to_go(stack, prompts):
    """SIGTERM with a stream that is longer than the grace: the client hears how to go on, and does."""
    prompt = prompts(80)
    with client_of(stack, 1) as other:
        expected = add_messages(Reply(), other.stream(prompt, **fields_of("seeded")))
        for process in stack.decode:
            process.arm("engine.step=sleep:0.05")
        with client_of(stack) as client:
            call = client.stream(prompt, request_id="told", **fields_of("seeded"))
            reply = read_some(call, 3)
            stack.gateways[0].terminate()
            with pytest.raises(grpc.RpcError) as caught:
                for message in call:
                    add_messages(reply, [message])
            said = read_error(caught.value)
            assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "DRAINING", said
        assert stack.gateways[0].wait() == 0
        received = [len(reply.choices[0].token_ids)]
        again = other.stream(prompt, request_id="told", resume_from=received, **fields_of("seeded"))
        same(add_messages(reply, again), expected)


class Load:
    """Clients that ask again and again, and know what they must be answered."""

    def __init__(self, stack: Stack, prompts, num_clients: int = 4):
        self._stack, self._stop = stack, threading.Event()
        self.wrong, self.num_answered, self.gaps = [], 0, []
        self._asks = [(prompts(90), fields_of(sampling)) for sampling in ("greedy", "seeded") for _ in range(2)]
        with client_of(stack) as client:
            self._expected = [add_messages(Reply(), client.stream(prompt, **fields)) for prompt, fields in self._asks]
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(num_clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, index: int) -> None:
        with client_of(self._stack) as client:
            while not self._stop.is_set():
                which = index % len(self._asks)
                prompt, fields = self._asks[which]
                try:
                    reply, at = Reply(), None
                    for message in client.stream(prompt, **fields):
                        now = time.monotonic()
                        self.gaps += [now - at] if at else []
                        at = now
                        add_messages(reply, [message])
                    same(reply, self._expected[which])
                except (grpc.RpcError, AssertionError) as error:
                    self.wrong.append(str(error))
                self.num_answered += 1


def drain(*args: str) -> str:
    command = [sys.executable, "-m", "baton.cli", "drain", *args]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("is_all", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one", "all"])
def test_workers_are_drained_under_load(stack, prompts, is_all):
    """Workers of each role drain; streams are longer than the grace, so they move. No request fails."""
    with Load(stack, prompts) as load:
        for process in stack.workers:
            process.arm("engine.step=sleep:0.03")
        for process in stack.workers if is_all else (stack.prefill[0], stack.decode[0]):
            before = load.num_answered
            assert "gone" in drain(stack.address[process.name])
            assert process.wait() == 0
            reborn = stack.restart(process)
            reborn.arm("engine.step=sleep:0.03")
            await_workers(stack, stack.gateways[0])
            while load.num_answered == before and not load.wrong:
                time.sleep(0.02)
    assert not load.wrong and load.num_answered


def test_the_kv_of_an_answer_moves_with_it(stack, prompts):
    """A drained decode worker gives it to the next one, which computes no more than what follows the last full span."""
    prompt, fields = prompts(100), fields_of("seeded", max_tokens=400)
    with client_of(stack) as client:
        whole = add_messages(Reply(), client.stream(prompt, **fields))
        before = recovered(stack.gateways[0])
        for process in stack.decode:
            process.arm("engine.step=sleep:0.02")
        call = client.stream(prompt, **fields)
        reply = Reply()
        while not reply.choices or len(reply.choices[0].token_ids) < 70:
            add_messages(reply, [next(call)])
        busy, *_ = decoding_at(stack)
        with grpc.insecure_channel(stack.address[busy.name]) as channel:  # a command would take a second to start
            worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(), timeout=patience(5))
        same(add_messages(reply, call), whole)
        assert busy.wait() == 0
    reused, computed = (after - then for after, then in zip(recovered(stack.gateways[0]), before, strict=True))
    assert reused >= 128 and 0 < computed <= 64, (reused, computed)


def recovered(gateway) -> tuple[float, float]:
    """Prompt tokens of later attempts: reused, computed."""
    page = urlopen(f"http://{gateway.ready()['admin']}/metrics", timeout=10).read().decode()
    found = dict(re.findall(r"^baton_recovery_tokens_total\{.*kv=\"(\w+)\".*\} (\S+)", page, re.MULTILINE))
    return float(found.get("reused", 0)), float(found.get("computed", 0))


@pytest.mark.long
def test_a_hundred_kills(stack, prompts, capsys):
    """Any worker at any moment, never two of a role at once. The gaps are printed."""
    rng, num_kills = random.Random(7), 100
    with Load(stack, prompts) as load:
        for number in range(num_kills):
            role = stack.decode if number % 3 else stack.prefill
            for process in stack.workers:
                process.arm(SLOW)
            time.sleep(rng.uniform(0.05, 0.4))
            victim = rng.choice(role)
            victim.kill()
            stack.restart(victim)
            await_workers(stack, stack.gateways[0])
    gaps = sorted(load.gaps)
    pauses = [gap for gap in gaps if gap > 5 * percentile(gaps, 50)]
    with capsys.disabled():
        print(f"\n{num_kills} kills, {load.num_answered} answers, all as undisturbed: {not load.wrong}")
        for name, values in (("gaps between messages", gaps), ("of these, pauses", pauses)):
            told = ", ".join(f"p{p} {percentile(values, p):.3f} s" for p in (50, 99))
            print(f"{len(values)} {name}: {told}, longest {max(values):.3f} s")
    assert not load.wrong, load.wrong[:3]


def test_a_worker_changes_its_role(stack, prompts):
    """At the same address, as the same process, for good: it is the last test that counts roles. No request fails."""
    process = stack.prefill[1]
    with Load(stack, prompts, num_clients=2) as load:
        said = drain(stack.address[process.name], "--next-role", "decode")
        assert "decode worker" in said and process.alive
        await_workers(stack, stack.gateways[0])
    assert not load.wrong and load.num_answered
