"""`--served-model-name`: clients, metrics and operators know the model by that name alone."""

import grpc
import pytest

from baton.v1 import fleet_pb2, fleet_pb2_grpc
from baton.v1 import inference_pb2 as pb
from tests.support.client import Client
from tests.support.stack import Stack

NAME = "acme/small 1"


def test_one_name_everywhere(model, fork_server, tmp_path):
    own = ("--served-model-name", NAME)
    options = {"options": ("--num-blocks", "160", "--threads", "1", *own), "gateway_options": own}
    with Stack(model, tmp_path, num_prefill=0, fork_server=fork_server, **options) as stack:
        client = Client(stack.target)
        assert client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10).name == NAME
        with grpc.insecure_channel(stack.target) as channel:
            fleet = fleet_pb2_grpc.FleetStub(channel).ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=10)
        assert [view.hello.model.name for view in fleet.workers] == [NAME]
        request = pb.GenerateRequest(text="x", model=NAME)
        request.stopping.max_tokens = 2
        assert client.stub.Complete(request, timeout=20).choices
        request.model = model.name
        with pytest.raises(grpc.RpcError) as raised:
            client.stub.Complete(request, timeout=20)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND and NAME in raised.value.details()
        client.close()
