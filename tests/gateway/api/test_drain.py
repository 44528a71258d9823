"""A gateway that is to go, behind one address with another one: what runs ends there, what comes goes to the other."""

import asyncio
import contextlib

import pytest
from openai import AsyncOpenAI
from starlette.responses import Response

from baton.client import AsyncClient, AsyncStream
from baton.service.net import http_connection
from tests.gateway.http.conftest import decoded, openai_client
from tests.support.faults.proxy import FaultProxy
from tests.support.gateway.fake_worker import tokens_of
from tests.support.pace import patience

PROMPT = list(range(20, 90))
NUM_TOKENS = 6
ASK = {"model": "fake", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def two(cluster):
    """`async with two(**settings) as (old, new, going)`: gateways; `going(proxy, address)` lets `proxy` lead new
    connections to `address`, as a Service does, and the first gateway drain."""

    @contextlib.asynccontextmanager
    async def start(**settings):
        async with cluster(**settings) as old, cluster(**settings) as new:

            async def going(proxy: FaultProxy, address: str) -> None:
                proxy.upstream = address
                old.stop.set()
                await old.until(lambda: old.gateway.handler.is_draining)

            yield old, new, going

    return start


async def test_calls_of_a_channel_go_elsewhere_while_its_streams_run_on(two):
    async with two() as (old, new, going), proxy_to(old.target) as proxy, AsyncClient(proxy.address) as client:
        old.decode[0].hold("decode")
        stream = client.stream(PROMPT, max_tokens=NUM_TOKENS)
        received = list((await anext(stream)).token_ids)
        await going(proxy, new.target)
        for _ in range(20):
            answer = await client.generate(PROMPT, max_tokens=2)
            assert answer.usage.output_tokens == 2
        assert old.gateway.handler.num_running == 1 and new.decode[0].kinds().count("admit") == 20
        old.decode[0].release("decode")
        received += await ids_of(stream)
        assert received == tokens_of(PROMPT, NUM_TOKENS, 400) and not stream.num_resumed


async def test_calls_on_their_way_as_a_gateway_begins_to_drain_are_answered(two):
    """gRPC cancels what has come and was not begun; clients send it again."""
    async with two() as (old, new, going), proxy_to(old.target) as proxy, AsyncClient(proxy.address) as client:
        await client.list_models()
        asking = asyncio.gather(*(client.generate(PROMPT, max_tokens=NUM_TOKENS) for _ in range(25)))
        reading = asyncio.gather(*(ids_of(client.stream(PROMPT, max_tokens=NUM_TOKENS)) for _ in range(25)))
        await going(proxy, new.target)
        assert [each.usage.output_tokens for each in await asking] == [NUM_TOKENS] * 25
        assert await reading == [tokens_of(PROMPT, NUM_TOKENS, 400)] * 25


async def test_http_calls_go_elsewhere_while_streams_run_on(two):
    """By a client that tries once."""
    async with two(http="127.0.0.1:0") as (old, new, going), proxy_to(http_of(old)) as proxy:
        async with AsyncOpenAI(base_url=f"http://{proxy.address}/v1", api_key="none", max_retries=0) as client:
            await client.models.list()  # its connection is kept
            old.decode[0].hold("decode")
            stream = await client.completions.create(**ASK, stream=True)
            await client.models.list()
            await going(proxy, http_of(new))
            await old.until(lambda: proxy.num_ended == 1)
            answer, *_ = [await client.completions.create(**ASK) for _ in range(5)]
            assert answer.usage.completion_tokens == NUM_TOKENS
            assert old.gateway.handler.num_running == 1
            old.decode[0].release("decode")
            assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text


async def test_a_gateway_that_drains_keeps_no_connection(cluster):
    """Nor that of an answer which runs, nor one that has asked nothing yet; and it takes no other."""
    async with cluster(http="127.0.0.1:0") as c, openai_client(c) as client:
        c.decode[0].hold("decode")
        running = asyncio.create_task(client.completions.with_raw_response.create(**ASK))
        await c.until(lambda: c.decode[0].held)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        c.stop.set()
        await c.until(lambda: c.gateway.handler.is_draining)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        writer.write(MODELS)
        _, headers, _ = decoded(await asyncio.wait_for(reader.read(), patience(20)))
        assert headers["connection"] == "close"
        writer.close()
        c.decode[0].release("decode")
        assert (await running).headers["connection"] == "close"


@pytest.mark.parametrize("num_sent", [0, 20])
async def test_a_request_that_comes_as_a_gateway_begins_to_drain_is_answered(cluster, num_sent):
    """A connection that had served none was closed, also with half a head: the client saw it reset."""
    async with cluster(http="127.0.0.1:0") as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        writer.write(MODELS[:num_sent])
        await c.until(lambda: [each._num_head_bytes for each in c.gateway.http._connections] == [num_sent])
        c.gateway.http.drain()
        writer.write(MODELS[num_sent:])
        status, headers, _ = decoded(await asyncio.wait_for(reader.read(), patience(20)))
        assert (status, headers["connection"]) == (200, "close")
        writer.close()


async def test_a_gateway_that_drains_stays_until_its_last_answers_are_read(cluster, monkeypatch):
    """The last one had a second; and five seconds after it was written it was cut, however steadily it was read."""
    monkeypatch.setattr(http_connection, "_FLUSH_S", 0.1)
    body = b"a page" * (4 << 20)
    async with cluster(http="127.0.0.1:0") as c:
        c.gateway.http.config.loaded_app = Response(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        writer.write(MODELS)
        await reader.readuntil(b"\r\n\r\n")
        other, late = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        c.stop.set()
        await c.until(lambda: c.gateway.http.is_draining)
        late.write(MODELS)  # its answer ends with its connection
        await other.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1.5)  # beyond what is left when all has ended
        assert await asyncio.gather(reader.read(), other.read()) == [body, body]
        for each in (writer, late):
            each.close()


async def ids_of(stream: AsyncStream) -> list[int]:
    return [token async for message in stream for token in message.token_ids]


def http_of(c) -> str:
    return f"127.0.0.1:{c.gateway.http.port}"


@contextlib.asynccontextmanager
async def proxy_to(address: str):
    proxy = FaultProxy(address)
    try:
        yield proxy
    finally:
        await asyncio.to_thread(proxy.close)
