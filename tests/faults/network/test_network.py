"""C: the network between gateway and workers, between workers, and to Redis. D: what it does to KV.

Transfers frame by frame (D1-D14): tests/kvtransfer/transfer/test_faults.py and test_transports_*.py.
"""

import asyncio
import time

import pytest

from tests.support.faults.cases import NOBODY_NOTICES, record_gaps
from tests.support.faults.proxy import FaultProxy
from tests.support.faults.world import World


async def running(c, count: int = 3, max_tokens: int = 60):
    """Requests in mid-stream, and the edge to the worker that writes one of them."""
    asks = c.ask_many(count, 100, max_tokens=max_tokens)
    await asyncio.gather(*(ask.got(5) for ask in asks))
    return asks, c.stack.proxy(await c.busy("decode"))


async def test_a_connection_is_reset(case):
    async with case("C1", NOBODY_NOTICES) as c:
        with c.slow():
            asks, edge = await running(c)
            edge.reset()
            await c.ended()
        record_gaps(c, asks)


@pytest.mark.long
@pytest.mark.parametrize("ways", [("up", "down"), ("down",), ("up",)], ids="-".join)
async def test_a_silent_stall(case, ways):
    """No FIN, no RST: nothing comes any more."""
    async with case(f"C2 C3 {'+'.join(ways)}", NOBODY_NOTICES) as c:
        with c.slow():
            asks, edge = await running(c, max_tokens=100)
            edge.stall(ways)
            await c.ended()
        record_gaps(c, asks)


@pytest.mark.long
async def test_redis_cannot_be_reached(case):
    async with case("C7", "all is a miss, nothing fails") as c:
        c.world.redis_proxy.refuse()
        await c.ended(*c.ask_many(6, 200))
        c.world.redis_proxy.heal()
        c.world.redis_proxy.stall()
        asks = c.ask_many(6, 200)
        await c.ended()
        c.figures["ttft_max_s"] = round(max(ask.times[0] - ask.began for ask in asks), 3)


@pytest.mark.long
async def test_an_idle_stream_lives(case):
    """A stream whose worker computes for 20 s without a word, over connections that are pinged all the while."""
    async with case("C10", "no healthy stream is ended by keepalive") as c:
        ask = c.ask(100, 30)
        await ask.got(2)
        with c.slow("engine.step=sleep:2"):
            await asyncio.sleep(20)
        await c.ended()
        record_gaps(c, [ask])


@pytest.mark.faults
async def test_a_slow_network(case):
    """100 to 300 ms each way, to every worker."""
    async with case("C4", "correct, no deadline is missed") as c:
        for process in c.stack.workers:
            c.stack.proxy(process).delay(0.2, 0.1)
            c.stack.proxy(process).throttle(1e6)
        asks = c.ask_many(4, 200, max_tokens=20)
        await c.ended()
        c.figures["ttft_max_s"] = round(max(ask.times[0] - ask.began for ask in asks), 2)


@pytest.mark.faults
async def test_one_byte_at_a_time(case):
    async with case("C5", NOBODY_NOTICES) as c:
        for process in c.stack.workers:
            c.stack.proxy(process).slice(1)
            c.stack.proxy(process).slow_close(0.5)
        await c.ended(*c.ask_many(3, 100, max_tokens=10))


@pytest.mark.faults
async def test_a_flapping_link(case):
    """Down and up, ten times, under load."""
    async with case("C8", "reconnects, and answers what is asked", ("OK", "UNAVAILABLE", "ABORTED")) as c:
        edge = c.stack.proxy(c.stack.decode[0])
        for _ in range(10):
            asks = c.ask_many(2, 100, max_tokens=20)
            edge.refuse()
            await asyncio.sleep(1.0)
            edge.heal()
            await asyncio.sleep(1.0)
            await c.ended(*asks)
        c.figures["connections"] = edge.num_accepted


@pytest.mark.faults
async def test_every_order_of_starts(make_world):
    """The gateway first, then its workers; a Redis that comes last."""
    with make_world("late", num_prefill=1, num_decode=1, redis=True) as world:
        async with world.case("C11", "ready by itself", ("OK",)) as c:
            c.gateway_is_lost = True
            world.redis.kill()
            for process in world.stack.workers:
                process.kill()
            world.gateway.kill()
            began = time.monotonic()
            starting = world.aside(world.restart, world.gateway)
            await asyncio.sleep(1.0)
            for process in list(world.stack.workers):
                await world.aside(world.restart, process)
            await starting
            c.figures["ready_after_s"] = round(time.monotonic() - began, 2)
            await c.ended(c.ask(100, 8))
            await world.aside(world.redis.start)


def kv_edge(world: World) -> FaultProxy:
    """Put a proxy at the advertised host of the prefill worker: on the same port of another address."""
    hello = world.probes["prefill0"].hello
    (endpoint,) = [endpoint for endpoint in hello.endpoints if endpoint.transport == "tcp"]
    host, port = endpoint.address.rsplit(":", 1)
    world.edges.append(FaultProxy(f"127.0.0.1:{port}", f"{host}:{port}"))
    return world.edges[-1]


@pytest.fixture(scope="module")
def edge_world(make_world):
    """One prefill worker whose KV is reached through a proxy, two decode workers; KV over TCP."""
    options = ("--num-blocks", "96", "--threads", "1", "--lease-ttl-s", "2", "--transports", "tcp")
    prefill = ("--advertise-host", "127.0.0.2")
    with make_world("edge", num_prefill=1, options=options, prefill_options=prefill) as world:
        yield world, kv_edge(world)


@pytest.mark.long
async def test_a_bit_flips_on_the_way(case, edge_world):
    world, edge = edge_world
    async with case("D1", "found before it is served", world=world) as c:
        edge.flip(6000, "down")  # in the payload: the messages before have some hundred bytes
        ask = c.ask(300, 20)
        await c.ended()
        assert edge.num_flipped == 1 and ask.status == "OK"


@pytest.mark.long
@pytest.mark.parametrize("num_bytes", [4000, 20000, 39000])
async def test_kv_is_cut_off(case, edge_world, num_bytes):
    world, edge = edge_world
    async with case(f"D2 {num_bytes}", "what is incomplete is never attended to", world=world) as c:
        edge.limit(num_bytes, "down")
        ask = c.ask(300, 20)
        while edge.num_open or not edge.num_accepted:
            await asyncio.sleep(0.01)
        edge.heal()
        await c.ended()
        record_gaps(c, [ask])


@pytest.mark.long
async def test_kv_stalls(case, edge_world):
    """For good: the request is answered another way, and both sides get their blocks back."""
    world, edge = edge_world
    allowed = ("OK", "UNAVAILABLE", "DEADLINE_EXCEEDED")
    async with case("D8", "a typed end, and all blocks back on both sides", allowed, world=world) as c:
        edge.stall(("down",))
        ask = c.ask(300, 20, timeout_s=12)
        await c.ended()
        c.figures["status"], c.figures["seconds"] = ask.status, round(ask.ended - ask.began, 2)


@pytest.mark.faults
async def test_no_kv_gets_through(case, edge_world):
    """Prefill and decode worker cannot reach each other, the gateway reaches both."""
    world, edge = edge_world
    async with case("C6", "a typed end for each", ("OK", "UNAVAILABLE", "ABORTED"), world=world) as c:
        edge.refuse()
        await c.ended(*c.ask_many(4, 200, max_tokens=8))
