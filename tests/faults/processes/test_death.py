"""A: workers and gateways that die, at every moment of a request. One of each role is left, so no client may notice."""

import asyncio

import pytest

from tests.support.faults.cases import NOBODY_NOTICES, record_gaps


async def kill_at(c, role: str, text: str, num_prompt: int = 200) -> None:
    """Requests meet a failpoint that kills the first of `role` that passes it."""
    workers = getattr(c.stack, role)
    c.arm_one(workers, text)
    asks = c.ask_many(4, num_prompt)
    dead = await c.doomed(*workers)
    await c.ended()
    c.figures["killed"] = dead.name
    record_gaps(c, asks)


async def test_a_decode_worker_dies_in_mid_stream(case):
    async with case("A6 mid", NOBODY_NOTICES) as c:
        with c.slow():
            asks = c.ask_many(4, max_tokens=60)
            await asyncio.gather(*(ask.got(20) for ask in asks))
            (await c.busy("decode")).kill()
        await c.ended()
        record_gaps(c, asks)


@pytest.mark.long
@pytest.mark.parametrize("nth", [1, 2, 5])
async def test_a_decode_worker_dies_at_a_token(case, nth):
    """Before it tells the nth run of tokens of one answer: 39 behind the first, at most 8 a run."""
    async with case(f"A6 token {nth}", NOBODY_NOTICES) as c:
        c.arm_one(c.stack.decode, f"decode.tokens=kill@{nth}")
        ask = c.ask(200, 40)
        await c.doomed(*c.stack.decode)
        await c.ended()
        record_gaps(c, [ask])


@pytest.mark.long
async def test_a_prefill_worker_dies_with_requests_queued(case):
    async with case("A1", NOBODY_NOTICES) as c:
        with c.slow("engine.step=sleep:0.2"):
            asks = c.ask_many(8, 400, max_tokens=8)
            (await c.busy("prefill")).kill()
        await c.ended()
        c.figures["ttft_max_s"] = round(max(ask.times[0] - ask.began for ask in asks), 3)


@pytest.mark.long
async def test_a_prefill_worker_dies_in_mid_computation(case, tcp_world):
    async with case("A2", NOBODY_NOTICES, world=tcp_world) as c:
        await kill_at(c, "prefill", "engine.step=kill@3", num_prompt=500)


@pytest.mark.long
@pytest.mark.parametrize("point", ["prefill.accepted", "prefill.done"])
async def test_a_prefill_worker_dies_before_anybody_hears(case, point):
    async with case(f"A3 {point}", NOBODY_NOTICES) as c:
        await kill_at(c, "prefill", f"{point}=kill")


@pytest.mark.long
@pytest.mark.parametrize("nth", [1, 2, 4])
async def test_a_prefill_worker_dies_in_mid_transfer(case, tcp_world, nth):
    """500 tokens in chunks of 128: four ranges."""
    async with case(f"A4 source range {nth}", NOBODY_NOTICES, world=tcp_world) as c:
        # Slow enough for each chunk to leave by itself.
        await kill_at(c, "prefill", f"engine.step=sleep:0.05, transfer.ready=kill@{nth}", num_prompt=500)


@pytest.mark.long
async def test_a_decode_worker_dies_in_mid_transfer(case, tcp_world):
    async with case("A4 taker", NOBODY_NOTICES, world=tcp_world) as c:
        for process in c.stack.prefill:
            process.arm("engine.step=sleep:0.05")
        await kill_at(c, "decode", "transfer.landed=kill@2", num_prompt=500)


@pytest.mark.long
async def test_a_decode_worker_dies_before_it_decodes(case):
    async with case("A5", NOBODY_NOTICES) as c:
        await kill_at(c, "decode", "decode.start=kill")


@pytest.mark.long
async def test_a_decode_worker_dies_between_the_last_token_and_the_end(case):
    async with case("A11", NOBODY_NOTICES) as c:
        await kill_at(c, "decode", "session.ended=kill")


@pytest.mark.long
async def test_a_gateway_dies(case):
    """Workers stop and give everything back; the next gateway serves."""
    async with case("A10", "blocks come back, the next gateway serves", ("UNAVAILABLE",)) as c:
        c.gateway_is_lost = True
        with c.slow():
            asks = c.ask_many(32, 60, max_tokens=200)
            await asyncio.gather(*(ask.got(2) for ask in asks[:4]))
            c.world.gateway.kill()
            await c.ended()
        assert {ask.status for ask in asks} == {"UNAVAILABLE"}


@pytest.mark.long
async def test_every_worker_is_restarted_under_load(case):
    """SIGTERM, wait until it is gone, start it again: the next one."""
    async with case("A13", "no request fails while every worker is restarted in turn") as c:
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                await c.ask(100, 12).task

        with c.slow("engine.step=sleep:0.005"):
            clients = [asyncio.create_task(client()) for _ in range(4)]
            for process in list(c.stack.workers):
                await asyncio.sleep(0.5)
                process.terminate()
                assert await c.world.aside(process.wait, 30) == 0, process.tail()
                process.killed = True  # it exited as ordered
                reborn = await c.world.aside(c.world.restart, process)
                reborn.arm("engine.step=sleep:0.005")
                await c.world.aside(c.world.settled)
            stop.set()
            await asyncio.gather(*clients)
        c.figures["rolls"] = 1
        record_gaps(c, c.history.asks)


@pytest.mark.faults
async def test_decode_workers_die_one_after_another(case):
    """Each death of a worker that has completed steps of a request is one more migration, up to the limit."""
    async with case("A7", "migrated again and again, then UNAVAILABLE", ("OK", "UNAVAILABLE", "ABORTED")) as c:
        slowly = "engine.step=sleep:0.2"
        with c.slow(slowly):
            ask = c.ask(200, 400)  # at least 80 s: each of them has come back long before it ends
            for count in (10, 20, 30):
                await ask.got(count)
                dead = await c.busy("decode")
                dead.kill()
                (await c.world.aside(c.world.restart, dead)).arm(slowly)
                await c.world.aside(c.world.settled)
        for process in c.stack.workers:
            process.arm("")
        await c.ended()
        record_gaps(c, [ask])


@pytest.mark.faults
async def test_all_decode_workers_die(case):
    async with case("A8", "UNAVAILABLE, and served again without a new gateway", ("UNAVAILABLE",)) as c:
        with c.slow():
            asks = c.ask_many(4, 100, max_tokens=100)
            await asyncio.gather(*(ask.got(3) for ask in asks))
            for process in c.stack.decode:
                process.kill()
            await c.ended()


@pytest.mark.faults
async def test_all_prefill_workers_die(case):
    """--split always: no other worker may read a prompt."""
    async with case("A9", "running answers go on, new ones are UNAVAILABLE", ("OK", "UNAVAILABLE")) as c:
        with c.slow():
            running = c.ask_many(3, 100, max_tokens=60)
            await asyncio.gather(*(ask.got(3) for ask in running))
            for process in c.stack.prefill:
                process.kill()
            late = c.ask(100, 4)
            await c.ended()
        assert {ask.status for ask in running} == {"OK"} and late.status == "UNAVAILABLE"


@pytest.mark.faults
async def test_a_stream_is_longer_than_the_grace(case, make_world):
    options = ("--num-blocks", "96", "--threads", "1", "--drain-grace-s", "1")
    with make_world("grace", options=options) as world:
        async with case("A14", "moved to another worker when the grace is over", world=world) as c:
            with c.slow():
                ask = c.ask(100, 300)
                await ask.got(5)
                going = await c.busy("decode")
                going.terminate()
                assert await c.world.aside(going.wait, 30) == 0
                going.killed = True
            await c.ended()
            record_gaps(c, [ask])


@pytest.mark.faults
async def test_sigterm_finds_leases(case):
    """A draining prefill worker waits until what it holds is pulled."""
    async with case("A15", "leases are pulled before it goes") as c:
        for process in c.stack.decode:
            process.arm("transfer.landed=sleep:0.3")
        asks = c.ask_many(2, 300, max_tokens=8)
        going = await c.busy("prefill")
        going.terminate()
        assert await c.world.aside(going.wait, 30) == 0
        going.killed = True
        await c.ended()
        record_gaps(c, asks)
