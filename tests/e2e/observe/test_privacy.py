"""Prompts and answers stay between client and model: a canary is sent through every API and ending, and nothing that an
operator can look at shows it."""

import secrets
import time
from urllib.request import urlopen

import grpc
import pytest

from baton.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.observe.traced import Traced
from tests.support.pace import patience

CANARY = "Xyzzy-plugh-canary"
LONG = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}


def published_texts(stack, receiver) -> dict[str, str]:
    """All that can be read of the stack from outside the call."""
    pages = {}
    for process in stack.processes:
        admin = process.ready()["admin"]
        for path in ("/metrics", "/readyz", *(["/", "/fleet.json"] if process in stack.gateways else [])):
            pages[f"{process.name}{path}"] = urlopen(f"http://{admin}{path}", timeout=10).read().decode()
    with grpc.insecure_channel(stack.target) as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        pages["ListRequests"] = str(stub.ListRequests(fleet_pb2.ListRequestsRequest(max_recent=500)))
        pages["ListWorkers"] = str(stub.ListWorkers(fleet_pb2.ListWorkersRequest()))
    pages["logs"] = stack.text()
    pages["spans"] = "\n".join(map(str, receiver.spans))
    pages["metrics over OTLP"] = "\n".join(map(str, receiver.metrics.points))
    return pages


def test_a_canary_is_seen_nowhere(stack, client, receiver, slow):
    answers = [
        client.generate(
            f"{CANARY} in a text", stop=[f"{CANARY} stop"], temperature=0.0, max_tokens=20, ignore_eos=True
        ),
        client.generate([("user", f"{CANARY} in a message")], temperature=0.0, max_tokens=20, ignore_eos=True),
        client.generate(f"{CANARY} with logprobs", temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True),
    ]
    cancelled = client.stream(f"{CANARY} cancelled", **LONG)
    next(cancelled)
    cancelled.cancel()
    refused = [
        lambda: client.generate(f"{CANARY} refused", top_p=7.0),
        lambda: client.generate([("user", f"<|user|>{CANARY}"), ("nobody", CANARY)], max_tokens=2),
        lambda: client.generate(f"{CANARY} too long " * 2000, max_tokens=2),
        lambda: client.generate(f"{CANARY} many stops", stop=[CANARY * 400], max_tokens=2),
        lambda: client.generate(f"{CANARY} late", timeout=0.05, **{**LONG, "max_tokens": 900}),
    ]
    for call in refused:
        with pytest.raises(grpc.RpcError):
            call()
    last = Traced(receiver)
    secret_ids = [900 + secrets.randbelow(90) for _ in range(60)]
    client.generate(secret_ids, metadata=last.metadata, temperature=0.0, max_tokens=4, ignore_eos=True)
    last.whole("decode")
    deadline = time.monotonic() + patience(30)
    while not receiver.metrics.points:  # every few seconds
        assert time.monotonic() < deadline
        time.sleep(0.1)
    spelled = ", ".join(map(str, secret_ids[:6]))
    words = {CANARY, "canary", spelled, spelled.replace(", ", " ")} | {answer.text.strip() for answer in answers}
    for where, text in published_texts(stack, receiver).items():
        assert text, where
        assert not [word for word in words if word in text], where
