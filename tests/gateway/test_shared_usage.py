"""Quotas that gateways share through a real Redis; one that does not answer bounds nobody more than a gateway alone."""

import json

import pytest

from baton.service.errors import Overloaded
from gateway.quotas import Quota, Quotas
from gateway.redis_client import FAILURES
from gateway.shared_usage import NAME, SharedUsage
from gateway.timing import now
from tests.gateway.test_answers import generate
from tests.gateway.test_endings import hold, refused, release, start
from tests.redis_server import RedisServer

TABLE = {"a": Quota(100.0, 500.0, 3)}


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


def gateways(server, num: int) -> list[tuple[Quotas, SharedUsage]]:
    made = [Quotas(TABLE) for _ in range(num)]
    return [(quotas, SharedUsage(quotas, server.url, bytes([i]) * 16)) for i, quotas in enumerate(made)]


async def tell(*shared: SharedUsage) -> None:
    """Twice: what one has told last the others hear then."""
    for each in shared * 2:
        await each._look()


def refusal(quotas: Quotas, tenant: str = "a") -> str:
    with pytest.raises(Overloaded) as caught:
        quotas.enter(tenant, now())
    return caught.value.reason


async def test_requests_of_all_gateways_are_counted(server):
    (here, first), (there, second) = gateways(server, 2)
    for _ in range(2):
        here.enter("a", now())
    there.enter("a", now())
    await tell(first, second)
    assert refusal(here) == refusal(there) == "TENANT_REQUESTS"
    here.leave("a")
    await tell(first, second)
    there.enter("a", now())
    there.enter("b", now())  # nobody bounds it, and nothing is told of it
    assert "b" not in there.told(now())
    for each in (first, second):
        await each._client.aclose()


async def test_tokens_of_all_gateways_are_counted_once(server):
    (here, first), (there, second) = gateways(server, 2)
    at = now()
    here.pay("a", 100, at)
    await tell(first, second)
    there.pay("a", 350, at)
    for _ in range(3):
        await tell(first, second)
    left = [quotas.told(at)["a"].balance for quotas in (here, there)]
    assert left == pytest.approx([50, 50], abs=40)  # the bucket fills by 100 a second meanwhile
    there.pay("a", 200, at)
    await tell(first, second)
    assert refusal(here) == refusal(there) == "TENANT_TOKENS"
    late, third = gateways(server, 3)[2]
    await tell(third)
    assert refusal(late) == "TENANT_TOKENS", "a gateway that has just started knows of it"
    for each in (first, second, third):
        await each._client.aclose()


async def test_gateways_that_do_not_see_each_other_count_alone(server, monkeypatch):
    (here, first), (there, second) = gateways(server, 2)
    for quotas in (here, there):
        for _ in range(2):
            quotas.enter("a", now())
    await tell(first, second)
    assert refusal(here) == "TENANT_REQUESTS"
    server.kill()
    await tell(first)
    assert refusal(here) == "TENANT_REQUESTS", "what was told a moment ago still counts"
    with monkeypatch.context() as patch:
        patch.setattr("gateway.shared_usage.TTL_S", 0)
        await tell(first)
    here.enter("a", now())
    server.start()
    await tell(first, second)
    assert refusal(here) == refusal(there) == "TENANT_REQUESTS"
    for each in (first, second):
        await each._client.aclose()


GARBAGE = [
    b"", b"nothing", b"[]", b"3", b"null", b'{"a": 1}', b'{"a": [1]}', b'{"a": ["x", 1, 1]}', b'{"a": [-1, 0, 0]}',
    b'{"a": [1, NaN, 0]}', b'{"a": [1, 1, Infinity]}', b'{"a b": [1, 1, 1]}', b"[" * 100_000, b"\xff", b"x" * (2 << 20),
]  # fmt: skip


async def test_what_others_write_there_is_not_trusted(server):
    ((here, first),) = gateways(server, 1)
    for i, value in enumerate(GARBAGE):
        server.client.set(f"baton:usage:{i:032x}", value)
        server.client.zadd(NAME, {f"{i:032x}": 1e12})
    for member in (b"\xff\xfe", b"no hex", b""):
        server.client.zadd(NAME, {member: 1e12})
    server.client.zadd(NAME, {f"{99:032x}": 1e12})
    server.client.set(f"baton:usage:{99:032x}", json.dumps({"a": [3, 10, 400.0]}))
    assert {tuple(told) for told in (await first.exchange()).values()} == {("a",)}
    await tell(first)
    assert refusal(here) == "TENANT_REQUESTS"
    server.client.delete(NAME)
    server.client.set(NAME, "of another type")
    with pytest.raises(FAILURES):
        await first.exchange()
    await first._client.aclose()


async def test_two_gateways(cluster, server, tmp_path):
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\nconcurrent_requests = 1\n")
    settings = {"quotas": path, "redis": server.url}
    async with cluster(**settings) as a, cluster(**settings) as b:
        hold(a, "decode")
        running = start(a)
        await b.until(lambda: any(told.get("default") for told in b.gateway._quotas._told.values()))
        assert (await refused(generate(b))).reason == "TENANT_REQUESTS"
        release(a, "decode")
        assert await running
        await b.until(lambda: not b.gateway._quotas._of("default", now()).num_elsewhere)
        assert await generate(b)
