"""Adapters that an operator loads, replaces and unloads while requests run."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
import transformers

from baton.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import GATEWAY_OPTIONS, OPTIONS
from tests.support.client import Client
from tests.support.model_folders.families import make_adapter
from tests.support.pace import patience
from tests.support.stack import SLOW_STEPS

PROMPT = "a lazy dog " * 60


@pytest.fixture(scope="module")
def root(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("root")
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for seed, name in enumerate(("first", "second")):
        make_adapter(folder / "adapters" / name, base, ["q_proj", "v_proj"], seed=seed)
    shutil.copytree(folder / "adapters" / "first", folder / "elsewhere")
    (folder / "adapters" / "link").symlink_to(folder / "elsewhere")
    return folder / "adapters"


@pytest.fixture(scope="module")
def live(run_stack, root):
    given = (*OPTIONS, "--adapter-root", str(root))
    with run_stack("live", options=given, gateway_options=GATEWAY_OPTIONS) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(live):
    client = Client(live.target)
    yield client
    client.close()


class Operator:
    """Calls every worker of a stack."""

    def __init__(self, stack):
        self._addresses = [stack.address[process.name] for process in stack.workers]

    def load(self, name: str, path: str) -> set[bytes]:
        request = worker_pb2.LoadAdapterRequest(name=name, path=path)
        return {answer.identity for answer in self._call("LoadAdapter", request)}

    def unload(self, name: str) -> None:
        self._call("UnloadAdapter", worker_pb2.UnloadAdapterRequest(name=name))

    def _call(self, method: str, request) -> list:
        answers = []
        for address in self._addresses:
            with grpc.insecure_channel(address) as channel:
                answers.append(getattr(worker_pb2_grpc.WorkerStub(channel), method)(request, timeout=patience(30)))
        return answers


def listed(client: Client) -> list[str]:
    return list(client.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10).adapters)


def await_listed(client: Client, names: list[str]) -> None:
    until = time.monotonic() + patience(10)
    while listed(client) != names:
        assert time.monotonic() < until, listed(client)
        time.sleep(0.02)


def ask(client: Client, name: str, **options):
    return client.generate(PROMPT, model=name, logprobs=1, **({"max_tokens": 12} | options))


def test_loaded_replaced_and_unloaded(live, client):
    operator, base = Operator(live), ask(client, "")
    identities = operator.load("bot", "first")
    assert len(identities) == 1
    await_listed(client, ["bot"])
    first = ask(client, "bot")
    assert first.outcome() != base.outcome()
    assert operator.load("bot", "second") != identities
    # The gateway hears of it from each worker at once; a moment may pass in which they differ.
    time.sleep(patience(0.5))
    second = ask(client, "bot")
    assert second.outcome() not in (first.outcome(), base.outcome())
    assert second.usage is not None and second.usage.cached_tokens == 0, "it read what the first one had computed"
    assert operator.load("bot", "first") == identities
    time.sleep(patience(0.5))
    again = ask(client, "bot")
    assert again.outcome() == first.outcome()
    assert again.usage is not None and again.usage.cached_tokens >= 64
    operator.unload("bot")
    await_listed(client, [])
    with pytest.raises(grpc.RpcError) as raised:
        inference = inference_pb2.GenerateRequest(text=PROMPT, model="bot")
        client.stub.Complete(inference, timeout=20)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert ask(client, "").outcome() == base.outcome()


def test_replaced_while_it_answers(live, client):
    operator = Operator(live)
    operator.load("busy", "first")
    await_listed(client, ["busy"])
    expected = ask(client, "busy", max_tokens=60)
    with live.armed(SLOW_STEPS), ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, client, "busy", max_tokens=60)
        time.sleep(0.4)
        operator.load("busy", "second")
        operator.unload("busy")
        assert not running.done()
        assert running.result().outcome() == expected.outcome()
    await_listed(client, [])


@pytest.mark.parametrize(
    ("name", "path", "code", "words"),
    [
        ("x", "", "INVALID_ARGUMENT", "path: is not below --adapter-root"),
        ("x", "../elsewhere", "INVALID_ARGUMENT", "path: is not below --adapter-root"),
        ("x", "link", "INVALID_ARGUMENT", "path: is not below --adapter-root"),
        ("x", "a\0b", "INVALID_ARGUMENT", "path: is none: embedded null byte"),
        ("x", "nothing", "INVALID_ARGUMENT", "adapter_config.json: no such file"),
        ("", "first", "INVALID_ARGUMENT", "name"),
        ("tiny", "first", "INVALID_ARGUMENT", "cannot have the name of the model"),
    ],
)
def test_what_is_not_loaded(live, client, name, path, code, words):
    with pytest.raises(grpc.RpcError) as raised:
        Operator(live).load(name, path)
    assert raised.value.code().name == code and words in str(raised.value.details())
    assert listed(client) == []


def test_what_is_not_there_is_not_unloaded(live):
    with pytest.raises(grpc.RpcError) as raised:
        Operator(live).unload("nobody")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_without_a_root_none_is_loaded(stack):
    with pytest.raises(grpc.RpcError) as raised:
        Operator(stack).load("x", "first")
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION and "--adapter-root" in str(
        raised.value.details()
    )


def test_workers_that_start_again_hold_what_was_loaded(live, client):
    operator = Operator(live)
    operator.load("kept", "first")
    await_listed(client, ["kept"])
    expected = ask(client, "kept")
    for process in live.workers:
        process.kill()
        live.restart(process)
    assert ask(client, "kept").outcome() == expected.outcome()
    operator.unload("kept")
    await_listed(client, [])
    process = live.decode[0]
    process.kill()
    live.restart(process)
    assert ask(client, "").token_ids
    assert listed(client) == []
