"""Adapters through a real stack: named by clients, computed by both roles, never in each other's cache."""

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
import transformers

from baton.v1 import inference_pb2 as pb
from tests.e2e.conftest import GATEWAY_OPTIONS, OPTIONS
from tests.support.client import Client, Reply, gather, make_request
from tests.support.model_folders.families import make_adapter

PROMPT = "a lazy dog " * 60
NAMES = ("", "a", "b")


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for seed, name in enumerate("ab"):
        make_adapter(folder / name, base, ["q_proj", "v_proj", "down_proj"], rank=16, seed=seed)
    return folder


@pytest.fixture(scope="module")
def adapted(run_stack, adapters, tmp_path_factory):
    allowed = tmp_path_factory.mktemp("allowed") / "tenants.toml"
    allowed.write_text('b = ["default"]\nhidden = ["acme"]\n')
    given = ",".join(f"{name}={adapters / path}" for name, path in (("a", "a"), ("b", "b"), ("hidden", "a")))
    gateway = (*GATEWAY_OPTIONS, "--http", "127.0.0.1:0", "--adapter-tenants", str(allowed))
    with run_stack("adapted", options=(*OPTIONS, "--adapter", given), gateway_options=gateway) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(adapted):
    client = Client(adapted.target)
    yield client
    client.close()


def ask(client: Client, model: str, prompt: str = PROMPT, **options):
    return client.generate(prompt, model=model, max_tokens=12, logprobs=1, **options)


def num_cached(reply: Reply) -> int:
    assert reply.usage is not None
    return reply.usage.cached_tokens


def test_each_has_its_own_answer_and_its_own_cache(client, model):
    first = {name: ask(client, name) for name in NAMES}
    assert len({str(reply.outcome()) for reply in first.values()}) == len(NAMES)
    assert [num_cached(reply) for reply in first.values()] == [0] * len(NAMES)
    for name in NAMES:
        again = ask(client, f"{model.name}:{name}" if name else model.name)
        assert again.outcome() == first[name].outcome()
        assert num_cached(again) >= 64


def test_together_as_alone(client):
    prompts = [(name, f"{index} quick brown fox " * 8) for index, name in enumerate(NAMES * 3)]
    alone = [ask(client, *each).outcome() for each in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda each: ask(client, *each).outcome(), prompts))
    assert together == alone


def test_read_here_as_split(run_stack, client, adapters):
    """One worker alone, without a gateway's choice of two."""
    given = f"x={adapters / 'a'}"
    with run_stack("alone", num_prefill=0, options=(*OPTIONS, "--adapter", given)) as stack:
        other = Client(stack.target)
        assert ask(other, "x").outcome() == ask(client, "a").outcome()
        other.close()


def test_a_worker_without_it_is_not_asked(run_stack, adapters):
    """One of two decode workers holds the adapter, and no prefill worker does: the prompt is read where it is
    answered."""
    given = ("--adapter", f"x={adapters / 'a'}")
    with run_stack("unlike", unlike_decode=[given], gateway_options=GATEWAY_OPTIONS) as stack:
        other = Client(stack.target)
        assert len({str(ask(other, "x", request_id=f"r{index}").outcome()) for index in range(6)}) == 1
        other.close()


@pytest.mark.parametrize("name", ["nobody", "hidden", "a:b"])
def test_names_that_are_not_served(client, model, name):
    with pytest.raises(grpc.RpcError) as raised:
        gather(client.stub.Generate(make_request(PROMPT, model=name), timeout=20))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert str(raised.value.details()).endswith(f"only {model.name} and its adapters a, b")


def test_listed_by_both_doors(client, adapted, model):
    assert list(client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10).adapters) == ["a", "b"]
    assert client.stub.GetModelInfo(pb.GetModelInfoRequest(model="a"), timeout=10).name == "a"
    address = re.findall(r" http=(\S+)", adapted.gateways[0].text())[0]
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=10) as page:
        listed = json.load(page)["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        (model.name, None), ("a", model.name), ("b", model.name),
    ]  # fmt: skip


def test_vectors_are_of_the_adapter(client):
    requests = [pb.EmbedRequest(model=name, inputs=[pb.EmbedInput(text="a dog")]) for name in (*NAMES, "a")]
    found = [list(client.stub.Embed(request, timeout=20).embeddings[0].values) for request in requests]
    assert found[1] == found[3] and found[0] != found[1] != found[2]
