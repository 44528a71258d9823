"""Clients that know nothing of Baton but its .proto files, or not even those."""

import json
import os
import re
import subprocess

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.v1 import inference_pb2 as pb
from tests.support.process import NODE_CLIENTS, ROOT, node

CANCELLED, INVALID_ARGUMENT = 1, 3


def test_a_node_client_gets_the_same_tokens(stack, client, slow):
    argv = [node(), "client.js", stack.target]
    ran = subprocess.run(argv, cwd=NODE_CLIENTS, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    saw = json.loads(ran.stdout)
    own = client.generate("def quick_brown_fox(self):", temperature=0.0, max_tokens=16, ignore_eos=True)
    for answer in (saw["stream"], saw["complete"]):
        assert answer["token_ids"] == own.token_ids and answer["text"] == own.text
    assert saw["stream"]["code"] == 0 and saw["stream"]["usage"]["output_tokens"] == 16
    assert saw["stream"]["ttft_s"] > 0
    assert saw["cancelled"]["code"] == CANCELLED and 2 <= saw["cancelled"]["num_messages"] < 500
    assert saw["refused"]["code"] == INVALID_ARGUMENT and "max_tokens" in saw["refused"]["details"]
    assert saw["health"] == {"check": "SERVING", "watch": "SERVING"}
    assert saw["info"]["vocab_size"] == 1024


@pytest.mark.parametrize("stops_at_once", [False, True])
def test_the_node_client_of_the_docs(stack, stops_at_once):
    """Word for word, but for the address, and of one answer whose messages have no text."""
    page = (ROOT / "docs" / "howto" / "clients.md").read_text()
    (program,) = re.findall(r"<!-- node -->\n```\n(.*?)```", page, re.DOTALL)
    program = program.replace("127.0.0.1:50051", stack.target)
    if stops_at_once:
        program = program.replace(
            "max_tokens: 32", f"max_tokens: 32, stop_token_ids: [{', '.join(map(str, range(1, 1023)))}]"
        )
    ran = subprocess.run(
        [node(), "-e", program],
        cwd=ROOT,
        env={**os.environ, "NODE_PATH": str(NODE_CLIENTS / "node_modules")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0 and not ran.stderr and (len(ran.stdout) > 5) != stops_at_once, ran.stderr


def _reflect(channel: grpc.Channel, *requests):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return list(stub.ServerReflectionInfo(iter(requests), timeout=20))


def test_reflection_lists_the_services(client):
    """As `grpcurl TARGET list` and `grpcurl TARGET describe` ask."""
    listing, file = _reflect(
        client.channel,
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Inference"),
    )
    names = {service.name for service in listing.list_services_response.service}
    assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= names
    files = map(descriptor_pb2.FileDescriptorProto.FromString, file.file_descriptor_response.file_descriptor_proto)
    services = {service.name: service for described in files for service in described.service}
    methods = {method.name for method in services["Inference"].method}
    assert methods == {"Generate", "Complete", "Tokenize", "Detokenize", "Embed", "Score", "GetModelInfo", "ListModels"}


@pytest.mark.parametrize("service", ["", "baton.v1.Inference"])
def test_health_is_served_to_checks_and_watches(client, service):
    stub = health_pb2_grpc.HealthStub(client.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    assert stub.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(request, timeout=10)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_health_of_an_unknown_service(client):
    stub = health_pb2_grpc.HealthStub(client.channel)
    request = health_pb2.HealthCheckRequest(service="no.such.Service")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(request, timeout=10)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_workers_answer_health(stack):
    for process in stack.workers:
        with grpc.insecure_channel(stack.address[process.name]) as channel:
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status
            assert status == health_pb2.HealthCheckResponse.SERVING


def test_model_info(client, model):
    info = client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert info.name == model.name and info.family == "llama"
    assert (info.context, info.vocab_size) == (1024, 1024)
    assert info.dtype == info.kv_dtype == "bf16" and info.quantization in ("", "none")
    assert info.attention and "shm" in info.transports
