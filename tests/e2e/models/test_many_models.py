"""Two models behind one gateway in real processes: each with its own workers and cache, one replaced while it answers,
one whose worker dies."""

import json
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.cli.main import main
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from tests.e2e.conftest import OPTIONS
from tests.support.client import Client
from tests.support.models import make_model
from tests.support.pace import patience
from tests.support.process import Process
from tests.support.stack import SLOW_STEPS
from tests.support.waiting import until

PROMPT = "a lazy dog " * 60


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three models of one tokenizer."""
    root = tmp_path_factory.mktemp("root")
    for seed, name in enumerate(("first", "other", "second")):
        make_model(root / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def many(run_stack, root):
    def of(name: str, path: str) -> tuple[str, ...]:
        return "--model", str(root / path), "--served-model-name", name

    gateway = ("--model", f"chat={root / 'first'},code={root / 'other'}", "--model-root", str(root))
    gateway += ("--http", "127.0.0.1:0", "--max-start-wait-s", "0.5")
    options = (*OPTIONS, *of("chat", "first"))
    with run_stack("many", options=options, unlike_decode=[of("code", "other")], gateway_options=gateway) as stack:
        until(lambda: states(stack) == {("chat", "serving"), ("code", "serving")})
        yield stack


@pytest.fixture(scope="module")
def client(many):
    client = Client(many.target)
    yield client
    client.close()


def fleet(stack, method: str, request):
    with grpc.insecure_channel(stack.target) as channel:
        return getattr(fleet_pb2_grpc.FleetStub(channel), method)(request, timeout=patience(20))


def states(stack) -> set[tuple[str, str]]:
    models = fleet(stack, "ListWorkers", fleet_pb2.ListWorkersRequest()).models
    return {(model.name, model.state) for model in models}


def ask(client: Client, model: str, **options):
    return client.generate(PROMPT, model=model, logprobs=1, **({"max_tokens": 12} | options))


def num_cached(reply) -> int:
    assert reply.usage is not None
    return reply.usage.cached_tokens


def test_each_has_its_own_answer_and_its_own_cache(client):
    first = {name: ask(client, name) for name in ("chat", "code")}
    assert [num_cached(reply) for reply in first.values()] == [0, 0], "one read what the other had computed"
    assert first["chat"].outcome() != first["code"].outcome()
    for name, reply in first.items():
        again = ask(client, name)
        assert again.outcome() == reply.outcome() and num_cached(again) >= 64


def test_listed_by_http(many):
    address = re.findall(r" http=(\S+)", many.gateways[0].text())[0]
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=10) as page:
        assert [each["id"] for each in json.load(page)["data"]] == ["chat", "code"]
    body = json.dumps({"prompt": "a", "max_tokens": 2, "model": "code"}).encode()
    asked = urllib.request.Request(f"http://{address}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20) as page:
        assert json.load(page)["model"] == "code"


def test_commands_that_ask_all_of_them(many, tmp_path, capsys):
    """`baton doctor` compares and connects workers of one model alone, and asks each; `baton batch` goes by its
    lines."""
    assert main(["doctor", "--json", "--target", many.target]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [each for each in checks if each["status"] in ("warning", "failure")] == []
    assert {each["text"].partition(":")[0] for each in checks if each["part"] == "request"} == {"chat", "code"}
    assert {each["where"].partition(" > ")[2] for each in checks if each["part"] == "handoff"} == {
        many.address[many.decode[0].name]
    }
    lines = tmp_path / "in.jsonl"
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    asked = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, "model": name}}
        for name in ("chat", "code")
    ]
    lines.write_text("".join(json.dumps(line) + "\n" for line in asked))
    assert main(["batch", str(lines), "--target", many.target]) == 0
    results = [
        json.loads(line)["response"]["body"] for line in (tmp_path / "in.results.jsonl").read_text().splitlines()
    ]
    assert [result["model"] for result in results] == ["chat", "code"]
    assert results[0]["choices"][0]["text"] != results[1]["choices"][0]["text"]


def test_one_whose_worker_dies(many, client):
    worker = many.decode[1]
    worker.kill()
    until(lambda: ("code", "waiting") in states(many))
    with pytest.raises(grpc.RpcError) as raised:
        ask(client, "code")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE and "no worker serves code" in str(raised.value.details())
    assert ask(client, "chat").usage is not None
    many.restart(worker)
    until(lambda: ("code", "serving") in states(many))
    assert ask(client, "code").usage is not None


def test_one_is_replaced_while_it_answers(many, client, root, tmp_path):
    """What has begun ends on the model that it began with; the next request is the new one's."""
    expected = ask(client, "chat", max_tokens=60)
    argv = [sys.executable, "-m", "decode_worker", "--listen", "127.0.0.1:0", *OPTIONS, "--gateways", many.target]
    argv += ["--model", str(root / "second"), "--served-model-name", "chat"]
    new = Process("new", argv, tmp_path, many.env)
    try:
        identity = new.ready()["model"]
        with many.armed(SLOW_STEPS), ThreadPoolExecutor(1) as threads:
            running = threads.submit(ask, client, "chat", max_tokens=60)
            time.sleep(0.4)
            fleet(many, "AddModel", fleet_pb2.AddModelRequest(name="chat", path="second", identity=identity))
            until(lambda: states(many) == {("chat", "retired"), ("chat", "serving"), ("code", "serving")})
            replaced = ask(client, "chat")
            assert not running.done(), "nothing was running when it was replaced"
            assert running.result().outcome() == expected.outcome()
        assert replaced.outcome() != ask(client, "code").outcome() and num_cached(replaced) == 0
        assert replaced.outcome() == ask(client, "chat").outcome()
        until(lambda: states(many) == {("chat", "serving"), ("code", "serving")})
        fleet(many, "RemoveModel", fleet_pb2.RemoveModelRequest(name="chat"))
        assert ask(client, "", max_tokens=2).usage is not None, "one model is left, which needs no name"
        assert new.stop() == 0, new.text()
    finally:
        new.kill()
