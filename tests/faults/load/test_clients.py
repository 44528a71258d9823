"""F: clients that go away, do not read, or come with too little time; H11: a request that kills its worker."""

import asyncio
import multiprocessing
import random
import socket
import time
from concurrent.futures import ProcessPoolExecutor

import grpc
import psutil
import pytest

from baton.v1 import inference_pb2_grpc
from tests.support.client import make_request
from tests.support.faults.limits import limited
from tests.support.faults.proxy import FaultProxy
from tests.support.stack import SLOW_STEPS

GIVES_BACK = "all blocks come back on both workers"
POISON = 1021  # beyond the ids that prompts are drawn from
PHASES = {
    "F1 queued": "engine.step=sleep:0.3",
    "F2 in prefill": "engine.batch=sleep:0.3",
    "F3 in transfer": "transfer.landed=sleep:0.3",
    "F4 in decode": "engine.step=sleep:0.05",
}


async def cancelled(c, phase: str, count: int = 4) -> None:
    """Cancelled while the workers are stopped in `phase`."""
    with c.slow(PHASES[phase]):
        asks = [c.ask(300, 100, n=1 + index % 2) for index in range(count)]
        if phase == "F4 in decode":
            await asyncio.gather(*(ask.got(3) for ask in asks))
        else:
            await c.busy("decode" if phase == "F3 in transfer" else "prefill")
        for ask in asks:
            ask.cancel()
        await c.ended()
    assert all(ask.status == "CANCELLED" for ask in asks)


async def test_a_client_cancels(case):
    async with case("F4 in decode", GIVES_BACK) as c:
        await cancelled(c, "F4 in decode")


@pytest.mark.long
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "F4 in decode"])
async def test_a_client_cancels_in_each_phase(case, phase):
    async with case(phase, GIVES_BACK) as c:
        await cancelled(c, phase)


@pytest.mark.long
async def test_a_client_is_gone_without_a_word(case):
    """F5: its network is cut; the gateway's own pings find that out. And another whose connection is reset."""
    async with case("F5", GIVES_BACK) as c:
        c.gateway_is_lost = True  # these two are not in the history
        edge = FaultProxy(c.stack.address["gateway0"])
        channel = grpc.aio.insecure_channel(edge.address)
        with c.slow():
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(make_request(c.world.prompt(100), max_tokens=900, temperature=0.0, ignore_eos=True))
            for _ in range(3):
                await call.read()
            edge.stall()
            began = asyncio.get_running_loop().time()
            while (await c.world.aside(c.world.counters)).num_running:
                assert asyncio.get_running_loop().time() - began < 40, "its request runs on"
                await asyncio.sleep(0.1)
            c.figures["found_after_s"] = round(asyncio.get_running_loop().time() - began, 1)
        call.cancel()
        await channel.close()
        edge.close()


@pytest.mark.long
async def test_a_client_that_never_reads(case):
    """F6: its answer is cut after a bound, at its deadline at the latest; others do not notice."""
    async with case("F6", "bounded, and no other client is affected") as c:
        c.gateway_is_lost = True  # the one that does not read is not in the history
        host, port = c.stack.address["gateway0"].split(":")
        edge = FaultProxy(f"{host}:{port}")
        channel = grpc.aio.insecure_channel(edge.address, options=(("grpc.http2.lookahead_bytes", 1024),))
        stub = inference_pb2_grpc.InferenceStub(channel)
        prompt = c.world.prompt(40)
        fields = {"max_tokens": 900, "n": 8, "logprobs": 20, "temperature": 1.0, "ignore_eos": True}
        calls = [stub.Generate(make_request(prompt, **fields), timeout=20) for _ in range(2)]
        edge.stall(("down",))
        others = c.ask_many(4, 100, max_tokens=30)
        await c.ended(*others)
        while (await c.world.aside(c.world.counters)).num_running:
            await asyncio.sleep(0.1)
        edge.heal()
        ends = await asyncio.gather(*(_ending(call) for call in calls))
        c.figures["ends"] = "+".join(sorted(ends))
        await channel.close()
        edge.close()


async def _ending(call) -> str:
    try:
        async for _ in call:
            pass
        return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name


@pytest.mark.long
async def test_deadlines_in_every_phase(case):
    """F8 F9: nothing is left of them. That none ends past its time the client's library sees to; how late is a
    figure."""
    async with case("F8 F9", "DEADLINE_EXCEEDED, nothing is left", ("DEADLINE_EXCEEDED",)) as c:
        for text in PHASES.values():
            with c.slow(f"{SLOW_STEPS}, {text}"):  # 200 tokens take four seconds, whatever else is slow
                asks = [c.ask(300, 200, timeout_s=timeout_s) for timeout_s in (0.0, 0.001, 0.05, 0.2, 0.5)]
                await c.ended(*asks)
        overruns = [
            ask.ended - ask.began - timeout for ask, timeout in zip(c.history.asks, (0, 0.001, 0.05, 0.2, 0.5) * 4)
        ]
        c.figures["overrun_max_s"] = round(max(overruns), 3)


async def test_a_poisonous_request_ends_after_two_deaths(case):
    """H11: a token that kills every engine that computes it, in a request that otherwise would go on and on."""
    async with case("H11", "ABORTED, reason POISON, after two deaths", ("ABORTED",)) as c:
        for process in c.stack.workers:
            process.arm(f"engine.batch[{POISON}]=kill")
        ask = c.ask([*c.world.prompt(100), POISON], 20)
        await c.ended()
        assert ask.reason == "POISON", ask.words()
        async with asyncio.timeout(30):  # the gateway may hear of a death before this process does
            while len(dead := [process for process in c.stack.workers if not process.alive]) < 2:
                await asyncio.sleep(0.01)
        for process in dead:
            process.wait_killed()
        c.figures["workers_killed"] = len(dead)
        assert len(dead) == 2


@pytest.mark.long
async def test_poison_that_fails_the_step(case):
    """The engine survives it: the request ends for what it did."""
    async with case("H11 fail", "one end, the workers live", ("INTERNAL", "ABORTED")) as c:
        c.known_words = ("Traceback",)
        for process in c.stack.workers:
            process.arm(f"engine.batch[{POISON}]=fail")
        ask = c.ask([*c.world.prompt(100), POISON], 20)
        await c.ended()
        assert all(process.alive for process in c.stack.workers)
        c.figures["status"] = f"{ask.status} {ask.reason}"


@pytest.mark.faults
async def test_the_same_request_id_twice_at_once(case):
    """F10: the second is refused or attached; their tokens are never mixed."""
    async with case("F10", "never mixed", ("OK", "ALREADY_EXISTS")) as c:
        with c.slow():
            prompt = c.world.prompt(100)
            asks = [c.ask(prompt, 30, request_id="twice") for _ in range(2)]
            await c.ended()
        assert {ask.status for ask in asks} <= {"OK", "ALREADY_EXISTS"} and "OK" in {ask.status for ask in asks}


@pytest.mark.faults
async def test_ten_thousand_requests_one_in_ten_cancelled(case):
    """F7, with what a cancel costs in memory."""
    async with case("F7", GIVES_BACK, ("OK", "RESOURCE_EXHAUSTED")) as c:
        draw, gate = random.Random(7), asyncio.Semaphore(32)
        prompts = [c.world.prompt(length) for length in (20, 64, 130, 300) for _ in range(8)]

        async def one() -> None:
            async with gate:
                ask = c.ask(draw.choice(prompts), draw.randint(1, 6), timeout_s=120)
                if draw.random() < 0.1:
                    asyncio.get_running_loop().call_later(draw.uniform(0, 0.1), ask.cancel)
                await asyncio.wait([ask.task])

        with c.slow("engine.step=sleep:0.002"):
            await asyncio.gather(*(one() for _ in range(10_000)))


@pytest.mark.faults
async def test_many_connections_at_once(case):
    """F11: 2,000 connects, dropped at once."""
    async with case("F11", "accepts again, descriptors come back") as c:
        host, port = c.stack.address["gateway0"].split(":")
        process = psutil.Process(c.world.gateway.pid)
        before = process.num_fds()
        for _ in range(4):
            socks = [socket.create_connection((host, int(port)), 10) for _ in range(500)]
            for sock in socks:
                sock.close()
        await c.ended(*c.ask_many(2, 50, max_tokens=4))
        began = asyncio.get_running_loop().time()
        while process.num_fds() > before + 8:
            assert asyncio.get_running_loop().time() - began < 30, f"{process.num_fds()} descriptors, {before} before"
            await asyncio.sleep(0.1)


@pytest.mark.faults
async def test_no_descriptor_is_left(case):
    """G6: the gateway may open eight more; a hundred connections come."""
    async with case("G6", "open connections continue, and it accepts again") as c:
        host, port = c.stack.address["gateway0"].split(":")
        num_open = psutil.Process(c.world.gateway.pid).num_fds()
        with c.slow():
            asks = c.ask_many(3, 100, max_tokens=40)
            await asyncio.gather(*(ask.got(3) for ask in asks))
            with limited(c.world.gateway, psutil.RLIMIT_NOFILE, num_open + 8):
                socks = [socket.create_connection((host, int(port)), 10) for _ in range(100)]
                await c.ended()
        for sock in socks:
            sock.close()


@pytest.mark.faults
async def test_rapid_reset(case):
    """F12: opened and cancelled at full speed by another process, for 10 s; others are answered meanwhile."""
    async with case("F12", "others are answered", ("OK", "RESOURCE_EXHAUSTED")) as c:
        c.gateway_is_lost = True  # the flood is not in the history
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            flooding = loop.run_in_executor(process, _flooded, c.stack.address["gateway0"], 10.0)
            while not flooding.done():
                await c.ended(*c.ask_many(2, 60, max_tokens=6))
            began, ended, c.figures["resets"] = await flooding
        meanwhile = [ask for ask in c.history.asks if began < ask.began and ask.ended < ended]
        answered = [ask for ask in meanwhile if ask.status == "OK"]
        c.figures["answered"] = f"{len(answered)}/{len(meanwhile)}"
        assert 2 * len(answered) > len(meanwhile)


def _flooded(target: str, seconds: float) -> tuple[float, float, int]:
    """Return when the flood began and ended (time.monotonic()), and how many it was."""
    began = time.monotonic()
    count = asyncio.run(_flood(target, seconds))
    return began, time.monotonic(), count


async def _flood(target: str, seconds: float) -> int:
    ends_at, count = asyncio.get_running_loop().time() + seconds, 0
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = make_request([9] * 20, max_tokens=50)
        while asyncio.get_running_loop().time() < ends_at:
            calls = [stub.Generate(request, timeout=5) for _ in range(50)]
            await asyncio.sleep(0.002)
            for call in calls:
                call.cancel()
            count += len(calls)
    return count
