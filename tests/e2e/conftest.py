"""Stacks that the tests of this folder share: started on the first use, and stopped behind the last one."""

import itertools
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.client import Client
from tests.support.models import make_model
from tests.support.observe.otlp import Receiver
from tests.support.observe.probe import Probe
from tests.support.process import Process
from tests.support.stack import SLOW_STEPS, Stack

_running: list[Stack] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure shows what the processes said last."""
    report = yield
    if report.failed:
        tails = [process.tail() for stack in _running for process in stack.processes]
        report.sections.append(("processes", "\n".join(tails)))
    return report


ROLES = ("prefill_worker", "decode_worker")
OPTIONS = ("--num-blocks", "160", "--threads", "1")
GATEWAY_OPTIONS = ("--split", "always")  # also where the gateway would not find it worth its while


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small random Llama, context 1,024, in bf16."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def receiver():
    """A real OTLP/gRPC receiver that every process of `stack` reports to."""
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def run_stack(model, fork_server, tmp_path_factory):
    """`with run_stack(name, ...) as stack`; at its end the logs must be clean and all must have exited 0 on SIGTERM."""

    @contextmanager
    def run(name: str, stack_class: type[Stack] = Stack, **options):
        options = {"options": OPTIONS, "fork_server": fork_server, **options}
        stack = stack_class(model, tmp_path_factory.mktemp(name), failpoints=True, **options)
        with stack:
            _running.append(stack)
            yield stack
            statuses = stack.stop()
            _running.remove(stack)
        complaints = stack.complaints()
        assert not complaints, "\n".join(complaints)
        assert not any(statuses.values()), statuses

    return run


@pytest.fixture(scope="package")
def stack(run_stack, receiver):
    """One gateway, one prefill and one decode worker; KV through shared memory."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    options = {"options": (*OPTIONS, "--transports", "shm"), "gateway_options": GATEWAY_OPTIONS}
    with run_stack("shm", env=env, **options) as stack:
        yield stack


@pytest.fixture
def slow(stack):
    """Slow steps down, so that a request of `stack` still runs when a test acts on it."""
    with stack.armed(SLOW_STEPS):
        yield


@pytest.fixture(scope="module")
def tcp_stack(run_stack):
    """The same, KV through a network stream."""
    options = {"options": (*OPTIONS, "--transports", "tcp"), "gateway_options": GATEWAY_OPTIONS}
    with run_stack("tcp", **options) as stack:
        yield stack


@pytest.fixture(scope="module")
def local_stack(run_stack):
    """A decode worker alone: it prefills for itself."""
    with run_stack("local", num_prefill=0) as stack:
        yield stack


def _client(stack: Stack):
    client = Client(stack.target)
    yield client
    client.close()


@pytest.fixture(scope="package")
def client(stack):
    yield from _client(stack)


@pytest.fixture(scope="module")
def tcp_client(tcp_stack):
    yield from _client(tcp_stack)


@pytest.fixture(scope="module")
def local_client(local_stack):
    yield from _client(local_stack)


@pytest.fixture(scope="package")
def probes(stack):
    """One look into each worker of `stack`, by process name."""
    probes = {process.name: Probe(stack.address[process.name]) for process in stack.workers}
    yield probes
    for probe in probes.values():
        probe.close()


@pytest.fixture(scope="session")
def prompts():
    """Draws prompts that no other test has used: `prompts(num_tokens)` -> token ids."""
    counter = itertools.count(1)

    def draw(num_tokens: int) -> list[int]:
        state = next(counter) * 2_654_435_761 % 2**32
        token_ids = []
        for _ in range(num_tokens):
            state = (state * 1_664_525 + 1_013_904_223) % 2**32
            token_ids.append(5 + (state >> 8) % 1000)
        return token_ids

    return draw


@pytest.fixture
def start(fork_server, tmp_path):
    """Return what starts a program and, once it has ended by itself, returns its exit status and stderr. Workers are
    forked from a process that has read torch: the lines are the same, and there are twenty."""

    def start(module: str, *options: str) -> tuple[int, str]:
        make = fork_server.process if module in ROLES else Process
        process = make(module, [sys.executable, "-m", module, *options], tmp_path)
        status = process.wait(60)
        assert "ready " not in process.out.read_text(), "it said that it is ready"
        return status, process.log.read_text()

    return start
