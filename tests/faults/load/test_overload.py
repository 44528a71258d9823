"""G: more than there is room for."""

import asyncio
import statistics
import time

import pytest

from baton.service.observe.telemetry import EXPORT_TIMEOUT_S
from gateway.attempts.failure_limits import MAX_BARREN
from tests.support.faults.history import percentile
from tests.support.faults.proxy import FaultProxy

OPTIONS = ("--num-blocks", "24", "--threads", "1", "--lease-ttl-s", "2")  # 768 tokens a worker


@pytest.fixture(scope="module")
def tight(make_world):
    """One worker of each role, whose pool holds two requests and not two whole answers; few may wait."""
    with make_world("tight", num_prefill=1, num_decode=1, options=OPTIONS) as world:
        yield world


async def test_the_pools_are_full(case):
    """G3: twenty whole answers take 250 blocks of 192. Some wait, some are parked and go on; each is what it would be
    alone."""
    async with case("G3", "no deadlock, exact after preemption", ("OK", "RESOURCE_EXHAUSTED")) as c:
        with c.slow("engine.step=sleep:0.01"):
            asks = [c.ask(100, 300, timeout_s=60) for _ in range(20)]
            await asyncio.gather(*(ask.got(1) for ask in asks[:2]))
        await c.ended()
        assert sum(ask.status == "OK" for ask in asks) >= 2


@pytest.mark.long
async def test_leases_that_nobody_takes_and_no_new_work(case, tight):
    """G4: the pool is full of what was left behind; it empties although nothing new comes."""
    async with case("G4", "leases expire by themselves", ("OK", "RESOURCE_EXHAUSTED"), world=tight) as c:
        c.stack.decode[0].arm("transfer.landed=sleep:0.2")
        asks = [c.ask(300, 20) for _ in range(6)]
        await c.busy("prefill")
        for ask in asks:
            ask.cancel()
        await c.ended()
        began = time.monotonic()
        faults = await c.world.aside(c.world.ledgers)
        assert not faults, faults
        c.figures["free_after_s"] = round(time.monotonic() - began, 2)


@pytest.mark.long
@pytest.mark.parametrize("times", [2, 5])
async def test_an_overloaded_stack_answers_what_it_can_and_refuses_the_rest(case, tight, times):
    """G1: open loop at a multiple of what is served; the rest is refused, with a delay."""
    async with case(
        f"G1 {times}x", "refused with a delay, the others are answered", ("OK", "RESOURCE_EXHAUSTED"), world=tight
    ) as c:
        capacity = await _goodput(c, None, 3.0)
        asked_before = len(c.history.asks)
        goodput = await _goodput(c, capacity * times, 5.0)
        asks = c.history.asks[asked_before:]
        refused = [ask for ask in asks if ask.status == "RESOURCE_EXHAUSTED"]
        assert all(ask.retry_after_s is not None for ask in refused)
        c.figures["capacity"], c.figures["goodput_ratio"] = round(capacity, 1), round(goodput / capacity, 2)
        c.figures["refused"] = len(refused)
        c.figures["refusal_p99_s"] = round(percentile([ask.ended - ask.began for ask in refused], 99), 3)
        assert goodput > capacity / 3  # they are equal where nothing else runs


async def _goodput(c, rate: float | None, seconds: float) -> float:
    """Answers a second: of four clients that wait for their answer, or of an open loop of that many a second."""
    began, asks = time.monotonic(), []

    async def closed() -> None:
        while time.monotonic() - began < seconds:
            asks.append(c.ask(100, 20))
            await asks[-1].task

    if rate is None:
        await asyncio.gather(*(closed() for _ in range(4)))
    else:
        while (elapsed := time.monotonic() - began) < seconds:
            while len(asks) < elapsed * rate:
                asks.append(c.ask(100, 20))
            await asyncio.sleep(0.005)
        await c.ended(*asks)
    return sum(ask.status == "OK" for ask in asks) / (max(ask.ended for ask in asks) - began)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["stall", "refuse"])
async def test_the_collector_of_traces_is_gone(case, make_world, fault):
    """G8: spans are dropped, requests are not."""
    edge = FaultProxy("127.0.0.1:9")
    getattr(edge, fault)()
    with make_world(f"collector-{fault}", env={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{edge.address}"}) as world:
        async with case(f"G8 {fault}", "nothing waits for it", world=world) as c:
            for _ in range(5):
                await c.ended(*c.ask_many(8, 100, max_tokens=10))
            ttfts = [ask.times[0] - ask.began for ask in c.history.asks]
            c.figures["ttft_p99_s"] = round(percentile(ttfts, 99), 3)
            assert statistics.median(ttfts) < EXPORT_TIMEOUT_S, "they have waited for it"
    edge.close()


@pytest.mark.faults
async def test_long_prompts_beside_short_ones(case, world):
    """G10: all of one tenant, whose prompts are read in the order in which they come. How long short ones wait behind
    long ones is a figure."""
    async with case("G10", "all are answered") as c:
        alone = [c.ask(40, 4) for _ in range(5)]
        await c.ended()
        longs = [c.ask(900, 8) for _ in range(6)]
        shorts = [c.ask(40, 4) for _ in range(10)]
        await c.ended(*longs, *shorts)
        for name, asks in (("alone", alone), ("beside", shorts)):
            c.figures[f"ttft_{name}_s"] = round(percentile([ask.times[0] - ask.began for ask in asks], 90), 3)


@pytest.mark.faults
async def test_a_retry_storm(case):
    """G11: all decode workers die under load and every client retries at once, as often as the refusal allows. That is
    no more than the budget holds: tests/gateway/attempts/test_retry_throttle.py uses that up."""
    async with case("G11", "served again, few attempts", ("OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")) as c:
        stop, num_clients = asyncio.Event(), 16

        async def client() -> None:
            while not stop.is_set():
                ask = c.ask(60, 10)
                await asyncio.wait([ask.task])
                if ask.retry_after_s is not None:
                    await asyncio.sleep(min(ask.retry_after_s, 1.0))

        clients = [asyncio.create_task(client()) for _ in range(num_clients)]
        await asyncio.sleep(1.0)
        for process in c.stack.decode:
            process.kill()
        await asyncio.sleep(2.0)
        await c.world.aside(c.world.heal)
        await asyncio.sleep(2.0)
        stop.set()
        await asyncio.gather(*clients)
        c.figures["asked"] = len(c.history.asks)
        num_migrations = int(c.world.counters().num_migrations - c._before.num_migrations)
        c.figures["migrations"] = num_migrations
        assert num_migrations <= num_clients * (MAX_BARREN - 1), "one request of each client was hit"
