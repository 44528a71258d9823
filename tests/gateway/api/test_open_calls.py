"""Calls that hold places and say nothing, by hundreds, from no one and from one tenant: others are answered
meanwhile."""

import asyncio
import contextlib
import hashlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.service.security.credentials import new_key
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.client import make_request, read_error
from tests.support.pace import patience

NUM_CALLS, NUM_CHANNELS = 700, 7
TENANTS = ("flood", "quiet")
METHODS = ("Generate", "Complete", "Tokenize", "Detokenize", "GetModelInfo")
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A file of credentials, and (metadata of) each tenant's."""
    path, tables, shown = tmp_path_factory.mktemp("keys") / "credentials.toml", [], {}
    for tenant in TENANTS:
        key, key_id, digest = new_key()
        tables.append(f'[keys.{key_id}]\ntenant = "{tenant}"\nsha256 = "{digest}"\n')
        shown[tenant] = (("authorization", f"Bearer {key}"),)
    path.write_text("\n".join(tables))
    return path, shown


@pytest.fixture
def guarded(cluster, keys, tmp_path):
    (tmp_path / "secret").write_text(hashlib.sha256(b"secret").hexdigest())
    return lambda **more: cluster(credentials=keys[0], cluster_secret=tmp_path / "secret", split="auto", **more)


@contextlib.asynccontextmanager
async def opened(c, method: str, metadata=(), messages=(), num_calls: int = NUM_CALLS):
    """Open `count` calls that never finish their request. Wait until the server has taken or refused each."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(c.target, options=options) for _ in range(NUM_CHANNELS)]
    calls = [channels[i % NUM_CHANNELS].stream_stream(method)(metadata=metadata) for i in range(num_calls)]

    async def begin(call) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.wait_for_connection()
            for message in messages:
                await call.write(message)

    await asyncio.gather(*map(begin, calls))
    try:
        yield calls
    finally:
        for channel in channels:
            await channel.close()


async def status_of(call) -> grpc.StatusCode:
    return await call.code()


async def answers(c, metadata=()) -> None:
    """Every kind of question, each by its deadline."""
    stub, health = inference_pb2_grpc.InferenceStub(c.channel), health_pb2_grpc.HealthStub(c.channel)
    for _ in range(3):
        request = make_request([5, 6, 7, 8], max_tokens=1)
        assert (await stub.Complete(request, timeout=20, metadata=metadata)).usage.output_tokens == 1
        await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20, metadata=metadata)
        serving = await health.Check(health_pb2.HealthCheckRequest(), timeout=patience(20))
        assert serving.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "method, messages", [(WATCH, [b""]), (WATCH, []), (CHECK, [])], ids=["idle", "silent", "check"]
)
async def test_no_one_takes_the_places_of_tenants(guarded, keys, method, messages):
    async with guarded() as c, opened(c, method, messages=messages) as calls:
        await answers(c, keys[1]["quiet"])
        await answers(c, keys[1]["flood"])
        if messages:  # two a connection
            await c.until(lambda: sum(not call.done() for call in calls) == 2 * NUM_CHANNELS)
        else:  # 2 s, and its place is free
            async with asyncio.timeout(30):
                await asyncio.gather(*map(status_of, calls))


@pytest.mark.parametrize("method", [METHODS[0], *(pytest.param(each, marks=pytest.mark.long) for each in METHODS[1:])])
async def test_one_tenant_does_not_take_those_of_others(guarded, keys, method):
    """They share one count: the other methods are in `make test-long`."""
    path = f"/baton.v1.Inference/{method}"
    async with guarded() as c, opened(c, path, metadata=keys[1]["flood"]) as calls:
        await answers(c, keys[1]["quiet"])
        await answers(c, keys[1]["flood"])  # nor its own
        async with asyncio.timeout(60):
            codes = set(await asyncio.gather(*map(status_of, calls)))
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_what_is_refused_is_told_why_and_when_to_come_back(guarded, keys):
    async with guarded() as c:
        async with opened(c, WATCH, messages=[b""]) as calls:
            await c.until(lambda: any(call.done() for call in calls))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await next(call for call in calls if call.done()).read()
        said = read_error(caught.value)
        assert said.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert said.reason == "TOO_MANY_CALLS" and said.retry_after_s
        async with opened(c, CHECK, num_calls=1) as (call,):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 30)
        said = read_error(caught.value)
        assert said.code is grpc.StatusCode.DEADLINE_EXCEEDED and said.reason == "MESSAGE_LATE"


async def test_without_credentials_there_is_one_tenant_and_kinds_are_apart(cluster):
    async with cluster() as c:
        for method in (WATCH, CHECK, "/baton.v1.Fleet/ListWorkers", "/baton.v1.Registration/Register",
                       "/baton.v1.Inference/Generate"):  # fmt: skip
            async with opened(c, method):
                await answers(c)


async def test_calls_of_a_tenant_with_a_quota(guarded, keys, tmp_path):
    """Beyond its quota and a few more it has none open, whatever they call."""
    (tmp_path / "quotas.toml").write_text("[flood]\nconcurrent_requests = 2\n")
    async with guarded(quotas=tmp_path / "quotas.toml") as c:
        async with opened(c, "/baton.v1.Inference/Tokenize", keys[1]["flood"], num_calls=60) as calls:
            codes = await asyncio.gather(*map(status_of, calls))
            await answers(c, keys[1]["quiet"])
    assert (
        codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == 10 and codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 50
    )


@pytest.mark.parametrize("method", METHODS)
async def test_metadata_is_counted_with_every_method(guarded, keys, method):
    async with guarded() as c:
        more = tuple((f"x-{index}", "v") for index in range(70))
        call = c.channel.stream_stream(f"/baton.v1.Inference/{method}")(metadata=(*keys[1]["quiet"], *more))
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # and no message is waited for
            await asyncio.wait_for(call.read(), 20)
        error = read_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "METADATA_TOO_LARGE")
        assert error.retry_after_s is None, "a client would send it again"
