"""What calls leave behind in a gateway is given back while it runs."""

import asyncio

import grpc
import psutil
import pytest

from baton.v1 import inference_pb2_grpc
from bench.gateway import fleet
from tests.support.client import make_request

NUM_FIRST, NUM_CALLS, AT_ONCE = 500, 4000, 32
MIB = 1 << 20


@pytest.mark.long
def test_refused_calls_leave_no_memory_behind():
    """They grew a gateway by 80 MiB: circles of gRPC's objects that nobody looked for."""
    with fleet(worker=("--full",), gateway=("--max-queued-requests", "0")) as made:
        process = psutil.Process(made.gateways[0].pid)
        asyncio.run(ask_and_be_refused(made.targets[0], NUM_FIRST))  # what is loaded with the first ones is not theirs
        before = process.memory_info().rss
        asyncio.run(ask_and_be_refused(made.targets[0], NUM_CALLS))
        assert process.memory_info().rss - before < 16 * MIB


async def ask_and_be_refused(target: str, num_calls: int) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stub, waiting = inference_pb2_grpc.InferenceStub(channel), iter(range(num_calls))

        async def work() -> None:
            for number in waiting:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    _ = [
                        message async for message in stub.Generate(make_request([number % 4000 + 5] * 64, max_tokens=6))
                    ]
                assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
