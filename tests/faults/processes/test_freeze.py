"""B: processes that freeze, wake again, or run slowly. One that wakes late may change nothing."""

import asyncio
import subprocess
import sys
import time

import pytest

from tests.support.faults.cases import NOBODY_NOTICES, record_gaps
from tests.support.faults.history import percentile
from tests.support.waiting import until_async


async def test_a_decode_worker_freezes_and_wakes_late(case):
    """Its streams have moved by then: its later messages reach no client, and its blocks come back."""
    async with case("B1 B2", "moved while it is frozen, its late tokens are dropped") as c:
        with c.slow("engine.step=sleep:0.05"):
            asks = c.ask_many(2, 100, max_tokens=80)
            await asyncio.gather(*(ask.got(5) for ask in asks))
            frozen = await c.busy("decode")
            frozen.freeze()
            await asyncio.sleep(1.0)  # what it had sent has come
            await asyncio.gather(*(ask.got(ask.num_tokens + 3) for ask in asks))
            c.figures["frozen_until_moved_s"] = round(max(ask.gap_s for ask in asks), 2)
            frozen.thaw()
        await c.ended()
        record_gaps(c, asks)


@pytest.mark.long
async def test_a_short_freeze_moves_nothing(case):
    async with case("B1 short", "continues where it was") as c:
        with c.slow():
            ask = c.ask(100, 100)
            await ask.got(5)
            frozen = await c.busy("decode")
            frozen.freeze()
            await asyncio.sleep(1.5)
            frozen.thaw()
            await c.ended()
        assert c.world.counters().num_migrations == c._before.num_migrations
        record_gaps(c, [ask])


@pytest.mark.long
async def test_a_prefill_worker_freezes_in_mid_transfer_beyond_its_lease(case, tcp_world):
    """Its late sends find the lease gone, and the blocks in other use."""
    async with case("B3", NOBODY_NOTICES, world=tcp_world) as c:
        c.arm_one(c.stack.prefill, "engine.step=sleep:0.1, transfer.ready=freeze@2")
        asks = c.ask_many(2, 500)
        frozen = await c.frozen(*c.stack.prefill)
        await c.ended()
        c.figures["ttft_max_s"] = round(max(ask.times[0] - ask.began for ask in asks), 2)
        others = c.ask_many(4, 300)  # into the blocks that have come back
        frozen.thaw()
        await c.ended(*others)


@pytest.mark.long
async def test_an_engine_wedges_while_its_process_answers(case):
    async with case("B7", "NOT_SERVING, and its streams move") as c:
        with c.slow():
            ask = c.ask(100, 80)
            await ask.got(5)
            wedged = await c.busy("decode")
            began = time.monotonic()
            wedged.arm("engine.step=wedge")
            await until_async(lambda: c.world.probes[wedged.name].latest.state == "stalled", "it says that it serves")
            c.figures["not_serving_after_s"] = round(time.monotonic() - began, 2)
            await c.ended()
        record_gaps(c, [ask])
        wedged.kill()  # its thread never comes back


@pytest.mark.long
async def test_the_event_loop_of_a_worker_is_blocked(case):
    """2 s without an answer from one worker, and no other process waits."""
    async with case("B6", "continues, and the others do not notice") as c:
        with c.slow():
            asks = c.ask_many(4, 100, max_tokens=60)
            await asyncio.gather(*(ask.got(3) for ask in asks))
            blocked = await c.busy("decode")
            blocked.arm("decode.tokens=sleep:2@1")
            await c.ended()
        record_gaps(c, asks)


@pytest.mark.faults
async def test_the_gateway_freezes(case):
    async with case("B4", "streams go on in order, no worker is taken for dead") as c:
        with c.slow():
            asks = c.ask_many(4, 100, max_tokens=100)
            await asyncio.gather(*(ask.got(3) for ask in asks))
            c.world.gateway.freeze()
            await asyncio.sleep(4.0)
            c.world.gateway.thaw()
            await c.ended()
        c.figures["migrations"] = int(c.world.counters().num_migrations - c._before.num_migrations)
        record_gaps(c, asks)


@pytest.mark.faults
async def test_starved_of_cpu(case):
    """Four busy loops on these cores: slow, but alive."""
    async with case("B5", "no process is taken for dead") as c:
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
        try:
            ends_at = time.monotonic() + 15
            while time.monotonic() < ends_at:
                await c.ended(*c.ask_many(4, 200, max_tokens=50))
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        counters = c.world.counters()
        c.figures["migrations"] = int(counters.num_migrations - c._before.num_migrations)
        assert not c.figures["migrations"], "a starved worker was taken for dead"


@pytest.mark.faults
async def test_one_slow_worker(case):
    """Ten times as slow as the other: its share of the requests falls."""
    async with case("B8", "answered, mostly by the quick one") as c:
        slow, quick = c.stack.decode
        slow.arm("engine.step=sleep:0.05")
        quick.arm("engine.step=sleep:0.005")
        before = [c.world.probes[process.name].load().step for process in (slow, quick)]
        for _ in range(6):
            await c.ended(*c.ask_many(4, 100, max_tokens=30))
        steps = [c.world.probes[process.name].load().step - count for process, count in zip((slow, quick), before)]
        c.figures["steps_slow"], c.figures["steps_quick"] = steps
        gaps = [ask.gap_s for ask in c.history.asks]
        c.figures["gap_p50_s"] = round(percentile(gaps, 50), 3)
