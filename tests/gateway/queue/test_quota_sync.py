"""Quotas that gateways share through a real Redis; one that does not answer bounds no tenant more than a gateway
alone."""

import asyncio
import json
import time

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.service.clock import now
from baton.service.errors import Overloaded
from gateway.queue import quota_sync
from gateway.queue.quota_file import Quota
from gateway.queue.quota_sync import NAME, PERIOD_S, SharedUsage, read_counts
from gateway.queue.quotas import MAX_COUNTED, Quotas
from gateway.queue.token_bucket import UsageCounts
from gateway.store.redis_client import FAILURES
from tests.gateway.calls import PROMPT, expect_refusal, generate, hold, read, release, start
from tests.support.client import make_request, read_error
from tests.support.pace import patience
from tests.support.redis_server import RedisServer

TABLE = {"a": Quota(0.01, 500.0, 3)}  # it fills by nothing meanwhile


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


def gateways(server, num: int) -> list[tuple[Quotas, SharedUsage]]:
    made = [Quotas(TABLE) for _ in range(num)]
    return [(quotas, SharedUsage(quotas, server.url, bytes([i]) * 16)) for i, quotas in enumerate(made)]


async def tell(*shared: SharedUsage) -> None:
    """Exchange twice: then each has the last report of the others."""
    for each in shared * 2:
        await each._look()


def refusal(quotas: Quotas, tenant: str = "a") -> str:
    with pytest.raises(Overloaded) as caught:
        quotas.enter(tenant, now())
    return caught.value.reason


async def test_requests_of_all_gateways_are_counted(server):
    (here, first), (there, second) = gateways(server, 2)
    large = here.enter("a", now(), 2)
    there.enter("a", now())
    await tell(first, second)
    assert refusal(here) == refusal(there) == "TENANT_REQUESTS"
    large.settle(0, now())
    await tell(first, second)
    there.enter("a", now())
    there.enter("b", now())  # nothing bounds it, and it is not reported
    assert "b" not in there.counts(now())
    for each in (first, second):
        await each._client.aclose()


async def test_tokens_of_all_gateways_are_counted_once(server):
    (here, first), (there, second) = gateways(server, 2)
    at = now()
    here.enter("a", at).reserve(100, at)
    await tell(first, second)
    second_request = there.enter("a", at)
    second_request.reserve(450, at)
    await tell(first, second)
    second_request.settle(350, at)
    for _ in range(3):
        await tell(first, second)
    left = [quotas.counts(at)["a"].balance for quotas in (here, there)]
    assert left == pytest.approx([50, 50], abs=1)
    there.enter("a", at).reserve(200, at)
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
    assert refusal(here) == "TENANT_REQUESTS", "what was reported a moment ago still counts"
    with monkeypatch.context() as patch:
        patch.setattr("gateway.queue.quota_sync.TTL_S", 0)
        await tell(first)
    here.enter("a", now())
    server.start()
    await tell(first, second)
    assert refusal(here) == refusal(there) == "TENANT_REQUESTS"
    for each in (first, second):
        await each._client.aclose()


async def test_gateways_that_have_gone_leave_the_set(server):
    """Behind as many as are looked at living ones would not be counted."""
    ((_, first),) = gateways(server, 1)
    server.client.zadd(NAME, {f"{i:032x}": time.time() - 1 for i in range(1000, 1100)})
    server.client.zadd(NAME, {f"{99:032x}": time.time() + 60})
    await first.exchange()
    assert server.client.zrange(NAME, 0, -1) == [bytes(16).hex().encode(), f"{99:032x}".encode()]
    await first._client.aclose()


GOOD = json.dumps({"a": [3, 10, 4, 400.0]}).encode()
GARBAGE = [
    b'{"a@": [1, 1, 1, 1]}', b'{"a@chat": [1, 1, 1, 1]}',
    b"", b"nothing", b"[]", b"3", b"null", b'{"a": 1}', b'{"a": [1]}', b'{"a": ["x", 1, 1, 1]}', b'{"a": [-1, 0, 0, 0]}',
    b'{"a": [1, NaN, 0, 0]}', b'{"a": [1, 1, 1, Infinity]}', b'{"a": [1, 1, 1, NaN]}', b'{"a b": [1, 1, 1, 1]}',
    b'{"a": [true, 1, 1, 1]}', b'{"a": [1, 1, 2, 1]}', b'{"a": [1.5, 1, 1, 1]}', b'{"a": {"b": 1}}', b"[" * 30_000,
    b'{"a": [1, %s, 1, 1]}' % (b"9" * 400), b'{"a": [1, 1, 1, %s]}' % (b"9" * 400), b'{"a": [1, %s, 1, 1]}' % (b"9" * 5000),
    b"\xff", b"x" * (2 << 20), GOOD + b" " * (64 << 10),
]  # fmt: skip


async def test_what_others_write_there_is_not_trusted(server):
    ((here, first),) = gateways(server, 1)
    for i, value in enumerate(GARBAGE):
        server.client.set(f"baton:usage:{i:032x}", value)
        server.client.zadd(NAME, {f"{i:032x}": 1e12})
    for member in (b"\xff\xfe", b"no hex", b"", b"\xff" * 32, b"A" * (1 << 20)):
        server.client.zadd(NAME, {member: 1e12})
    server.client.zadd(NAME, {f"{98:032x}": 1e12, f"{99:032x}": 1e12})
    server.client.lpush(f"baton:usage:{98:032x}", "of another type")
    server.client.set(f"baton:usage:{99:032x}", GOOD)
    assert await first.exchange() == {f"{99:032x}": {"a": UsageCounts(3, 10, 4, 400.0)}}
    await tell(first)
    assert refusal(here) == "TENANT_REQUESTS"
    server.client.delete(NAME)
    server.client.set(NAME, "of another type")
    with pytest.raises(FAILURES):
        await first.exchange()
    await tell(first)
    assert server.client.zrange(NAME, 0, -1) == [bytes(16).hex().encode()], "what no gateway writes there is removed"
    await first._client.aclose()


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5), max_leaves=20,
).map(lambda value: json.dumps(value).encode()) | st.dictionaries(
    st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.lists(st.integers() | st.floats(), min_size=4, max_size=4), max_size=3,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_value_is_read_or_left(value):
    """And what is read can be counted."""
    told = read_counts(value)
    quotas = Quotas(TABLE)
    for tenant in ("a", *told):
        quotas.enter(tenant, 0.0)
    for _ in range(2):
        quotas.note_others({"other": told}, 1.0)
        assert all(abs(each.balance) < 1e18 for each in quotas.counts(1.0).values())


async def test_a_large_value_does_not_travel(server):
    """Nor do many: what is read of each is bounded before its length is known."""
    ((_, first),) = gateways(server, 1)
    for i in range(20):
        server.client.set(f"baton:usage:{i:032x}", b"x" * (8 << 20))
        server.client.zadd(NAME, {f"{i:032x}": 1e12})
    server.client.zadd(NAME, {b"y" * (8 << 20): 1e12})
    server.client.zadd(NAME, {f"{i:032x}": 1e12 for i in range(1000, 20_000)})
    before = server.client.info("stats")["total_net_output_bytes"]
    await first.exchange()
    assert server.client.info("stats")["total_net_output_bytes"] - before < 4 << 20
    await first._client.aclose()


async def test_the_counts_of_many_gateways_leave_each_turn_to_others(server, monkeypatch):
    """Those of 64 with as many tenants as one tells took the loop 90 ms at once, and with as many as fit 750 ms. What
    a gateway tells again is not read again."""
    ((_, first),) = gateways(server, 1)
    for i in range(20):
        server.client.set(f"baton:usage:{i:032x}", json.dumps({"a": [0, i, 0, 0.0]}))
        server.client.zadd(NAME, {f"{i:032x}": 1e12})
    num_turns, turns, values = 0, [], []

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    def read(value) -> dict:
        turns.append(num_turns)
        values.append(value)
        return read_counts(value)

    monkeypatch.setattr(quota_sync, "read_counts", read)
    counting = asyncio.create_task(count_turns())
    told = await first.exchange()
    assert len(turns) == len(set(turns)) == 20 - 1  # one of the names is its own
    server.client.set(f"baton:usage:{1:032x}", b'{"a": [0, 99, 0, 0.0]}')
    again = await first.exchange()
    assert values[19:] == [b'{"a": [0, 99, 0, 0.0]}']
    assert again == {**told, f"{1:032x}": {"a": UsageCounts(0, 99, 0, 0.0)}}
    counting.cancel()
    await first._client.aclose()


def test_more_tenants_than_a_gateway_tells_are_not_read():
    told = {f"t{i}": [1, 1, 0, 0.0] for i in range(MAX_COUNTED)}
    assert len(read_counts(json.dumps(told).encode())) == MAX_COUNTED
    assert read_counts(json.dumps({**told, "one_more": [1, 1, 0, 0.0]}).encode()) == {}


async def test_nothing_that_a_round_meets_ends_the_next(server, monkeypatch, caplog):
    ((_here, first),) = gateways(server, 1)
    rounds = asyncio.Queue()

    async def exchange():
        rounds.put_nowait(None)
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(first, "exchange", exchange)
    monkeypatch.setattr("gateway.queue.quota_sync.PERIOD_S", 0.001)
    running = asyncio.create_task(first.run())
    async with asyncio.timeout(10):
        for _ in range(5):
            await rounds.get()
    assert not running.done() and caplog.text.count("counted without other gateways") == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_tenant_that_is_only_told_of_takes_no_memory(server):
    ((here, first),) = gateways(server, 1)
    server.client.set(f"baton:usage:{1:032x}", json.dumps({f"t{i}": [1, 1, 0, 0.0] for i in range(MAX_COUNTED)}))
    server.client.zadd(NAME, {f"{1:032x}": 1e12})
    await tell(first)
    assert not here._buckets and len(here._counts) == 1
    await first._client.aclose()


async def test_two_gateways_share_a_quota(cluster, server, tmp_path):
    path = tmp_path / "quotas.toml"
    path.write_text("[default]\nconcurrent_requests = 1\n")
    settings = {"quotas": path, "redis": server.url}
    async with cluster(**settings) as a, cluster(**settings) as b:
        hold(a, "decode")
        running = start(a)
        await b.until(lambda: any(told.get("default") for told in b.gateway._quotas._counts.values()))
        assert (await expect_refusal(generate(b))).reason == "TENANT_REQUESTS"
        release(a, "decode")
        assert await running
        await b.until(lambda: not b.gateway._quotas._bucket_for("default", now()).num_elsewhere)
        assert await generate(b)


async def flood(c, until: float, used: list[int]) -> None:
    """Send one request after the other until `until`; `used` gets the cost of each."""
    while now() < until:
        try:
            messages = await read(c.stub.Generate(make_request(PROMPT[:40], max_tokens=20, n=2), timeout=patience(20)))
            used.append(messages[-1].usage.prompt_tokens + messages[-1].usage.output_tokens)
        except grpc.aio.AioRpcError as error:
            assert read_error(error).reason in ("TENANT_REQUESTS", "TENANT_TOKENS")
            await asyncio.sleep(0.005)


async def test_a_tenant_that_floods_two_gateways_gets_no_more_than_the_docs_say(cluster, server, tmp_path):
    """Each of two lets in what is left, until it has heard of the other; what was too much is missing afterwards."""
    path = tmp_path / "quotas.toml"
    rate, burst, choices, request = 400.0, 800.0, 8, 80
    path.write_text(f"[default]\ntokens_per_s = {rate}\nburst_tokens = {burst}\nconcurrent_requests = {choices}\n")
    settings = {"quotas": path, "redis": server.url, "num_prefill": 0}
    async with cluster(**settings) as a, cluster(**settings) as b:
        used, begun, most = [], now(), 0

        async def watch() -> None:
            nonlocal most
            while True:
                usages = [c.gateway._quotas._buckets.get("default") for c in (a, b)]
                most = max(most, sum(usage.num_running for usage in usages if usage))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        until = begun + 12 * PERIOD_S
        await asyncio.gather(*(flood(c, until, used) for c in (a, b) for _ in range(8)))
        watching.cancel()
        assert choices <= most <= 2 * choices
        took_s = time.monotonic() - begun
        assert burst < sum(used) <= 2 * (burst + request + rate * 2 * PERIOD_S) + rate * (took_s - 2 * PERIOD_S)
        for c in (a, b):
            usage = c.gateway._quotas._buckets.get("default")
            assert usage is None or usage.num_running == 0
