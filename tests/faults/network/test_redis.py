"""E: a Redis that dies, freezes, forgets, fills up or returns false values. It is a hint: no request fails, no token
changes.

The index alone, call by call: tests/gateway/prefix/test_redis_index.py (E2, E7, E11, E14 among others).
"""

import asyncio
import time

import pytest

from tests.support.faults.cases import A_HINT, ask_some, warm_prompts
from tests.support.waiting import until_async


def record_ttft(c, asks) -> None:
    c.figures["ttft_max_s"] = round(max(ask.times[0] - ask.began for ask in asks), 3)


async def test_redis_dies_and_comes_back_empty(case):
    async with case("E1 E2", A_HINT) as c:
        prompts = await warm_prompts(c)
        c.world.redis.kill()
        record_ttft(c, await ask_some(c, prompts))
        await c.world.aside(c.world.redis.start)
        began = time.monotonic()
        await until_async(lambda: c.world.redis.client.keys("baton:slot:*"), "no gateway has come back to it")
        c.figures["used_again_after_s"] = round(time.monotonic() - began, 2)
        await ask_some(c, prompts)


@pytest.mark.long
async def test_frozen_redis_fails_no_request(case):
    async with case("E3", A_HINT) as c:
        prompts = await warm_prompts(c)
        c.world.redis.freeze()
        record_ttft(c, await ask_some(c, prompts))
        await asyncio.sleep(3.0)
        await ask_some(c, prompts)
        c.world.redis.thaw()


@pytest.mark.long
async def test_wrong_entries_fail_no_request(case):
    """E4-E6: entries of workers that are gone, of blocks that are gone, and of prefixes that no worker has."""
    async with case("E4 E5 E6", A_HINT) as c:
        prompts = await warm_prompts(c)
        client = c.world.redis.client
        client.set("baton:slot:250", b"x" * 24)  # an unknown worker
        for key in client.keys("kv:*"):
            client.setrange(key, 0, b"\xff" * 32)  # every worker has every block
        asks = [c.ask(prompt[:128] + c.world.prompt(100), 8) for prompt in prompts]
        await c.ended(*asks)
        await ask_some(c, prompts)
        client.delete("baton:slot:250")


@pytest.mark.long
async def test_garbage_stands_in_redis(case):
    async with case("E7", A_HINT) as c:
        prompts = await warm_prompts(c)
        client = c.world.redis.client
        for index, key in enumerate(client.keys("kv:*")):
            client.delete(key)
            if index % 3 == 0:
                client.lpush(key, "no string")
            else:
                client.set(key, b"\xfe" * (1 << 20 if index % 3 == 1 else 3))
        await ask_some(c, prompts, 10)
        client.flushdb()


@pytest.mark.long
async def test_redis_is_flushed_under_load(case):
    async with case("E11", A_HINT) as c:
        prompts = await warm_prompts(c)
        for _ in range(5):
            asks = [c.ask(prompts[index % 2], 8) for index in range(4)]
            c.world.redis.client.flushall()
            await c.ended(*asks)


@pytest.mark.faults
@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
async def test_a_full_redis_costs_prefixes_only(case, policy):
    async with case(f"E8 {policy}", A_HINT) as c:
        client = c.world.redis.client
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", str(int(client.info("memory")["used_memory"]) + 20_000))
        try:
            prompts = await warm_prompts(c, 6)
            await ask_some(c, prompts)
        finally:
            client.config_set("maxmemory", "0")


@pytest.mark.faults
async def test_redis_becomes_a_replica(case):
    """E10: READONLY to every write."""
    async with case("E10", A_HINT) as c:
        c.world.redis.client.replicaof("127.0.0.1", "1")
        prompts = await warm_prompts(c)
        await ask_some(c, prompts)
        c.world.redis.client.replicaof("NO", "ONE")


@pytest.mark.faults
async def test_a_slow_redis_costs_prefixes_only(case):
    """E12: half a second each way."""
    async with case("E12", A_HINT) as c:
        prompts = await warm_prompts(c)
        c.world.redis_proxy.delay(0.25)
        record_ttft(c, await ask_some(c, prompts, 10))


@pytest.mark.faults
async def test_a_redis_that_lets_nobody_in_costs_prefixes_only(case):
    """E13: no connection is left, then no right is."""
    async with case("E13", A_HINT) as c:
        prompts = await warm_prompts(c)
        client = c.world.redis.client
        client.config_set("maxclients", "1")
        c.world.redis_proxy.reset()
        await ask_some(c, prompts)
        client.config_set("maxclients", "1000")
        client.acl_setuser(
            "default", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-mget", "-setbit"]
        )
        try:
            await ask_some(c, prompts)
        finally:
            client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], categories=["+@all"])
