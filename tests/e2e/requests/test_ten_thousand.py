"""Ten thousand requests, one in ten cancelled at a random moment: not a block is left behind."""

import asyncio
import random

import grpc
import pytest

from baton.v1 import inference_pb2_grpc
from tests.support.client import make_request
from tests.support.observe.probe import Probe

NUM_REQUESTS, CONCURRENCY, CANCELLED = 10_000, 24, 0.1
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def busy_stack(run_stack):
    """Two workers of each role, so that cancels meet every pairing; a small pool, so that they meet full ones too."""
    options = ("--num-blocks", "96", "--threads", "1", "--lease-ttl-s", "2")
    with run_stack(
        "busy", num_prefill=2, num_decode=2, options=options, gateway_options=("--split", "always")
    ) as stack:
        with stack.armed("engine.step=sleep:0.002"):  # or most would have their answer before they are cancelled
            yield stack


async def one(stub, rng: random.Random) -> str:
    """Run one request and return its end: ok | cancelled | refused."""
    prompt = [rng.randrange(10, 250) for _ in range(rng.choice((20, 64, 130, 300)))]
    request = make_request(
        prompt, temperature=0.0, max_tokens=rng.randint(1, 6), ignore_eos=True, n=rng.choice((1, 1, 2))
    )
    call = stub.Generate(request, timeout=120)
    canceller = None
    if rng.random() < CANCELLED:
        canceller = asyncio.get_running_loop().call_later(rng.uniform(0, 0.1), call.cancel)
    try:
        async for _ in call:
            pass
        return "ok"
    except asyncio.CancelledError:
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
        return "refused"
    finally:
        if canceller:
            canceller.cancel()


async def drive(target: str) -> dict[str, int]:
    rng = random.Random(0)
    counts = {"ok": 0, "cancelled": 0, "refused": 0}
    gate = asyncio.Semaphore(CONCURRENCY)
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def gated(seed: int) -> None:
            async with gate:
                counts[await one(stub, random.Random(seed))] += 1

        await asyncio.gather(*(gated(rng.randrange(1 << 40)) for _ in range(NUM_REQUESTS)))
    return counts


def test_the_ledgers_are_at_zero(busy_stack):
    counts = asyncio.run(drive(busy_stack.target))
    print(counts)
    assert counts["ok"] > 0.8 * NUM_REQUESTS and counts["cancelled"] > 0.05 * NUM_REQUESTS
    for process in busy_stack.workers:
        probe = Probe(busy_stack.address[process.name])
        probe.wait_idle()
        probe.close()
