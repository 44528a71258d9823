"""More calls at once than gRPC by itself would keep in line: every one is answered, or refused with a reason."""

import asyncio

import grpc

from tests.gateway.calls import PROMPT
from tests.support.client import make_request
from tests.support.pace import patience

NUM_CALLS = 1_500  # with gRPC's own bound of 1,000 a part of them was cancelled


async def test_a_burst_is_refused_and_not_cancelled(cluster):
    async with cluster(max_concurrent_requests=8) as c:

        async def end() -> str:
            try:
                await c.stub.Complete(make_request(PROMPT[:4], max_tokens=1), timeout=patience(60))
                return "OK"
            except grpc.aio.AioRpcError as error:
                return error.code().name

        ends = await asyncio.gather(*(end() for _ in range(NUM_CALLS)))
        assert set(ends) <= {"OK", "RESOURCE_EXHAUSTED"} and "OK" in ends
        await c.idle()
