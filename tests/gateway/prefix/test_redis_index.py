"""The index in a real Redis: two gateways share what they know, and whatever Redis does is a miss at worst."""

import asyncio
import contextlib
import hashlib
import itertools

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import worker_pb2 as pb
from gateway.prefix import indexed_worker, redis_index, slot_leases
from gateway.prefix.prefix_matches import Matches
from gateway.prefix.redis_index import RedisIndex, SecretDiffers
from gateway.prefix.slot_leases import KV_TTL_S
from gateway.prefix.worker_bitmap import NUM_SLOTS, bit_sets, worker_bits_of
from tests.gateway.calls import generate
from tests.support.faults.proxy import FaultProxy
from tests.support.gateway.redis_index import OTHER, SPANS, WORKER, entries_of, entry_of, finds, index, snapshot
from tests.support.redis_server import RedisServer
from tests.support.waiting import until_async


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


async def test_what_one_writes_the_other_finds(server):
    async with index(server, b"a") as a, index(server, b"b", None) as b:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:5]))
        await finds(b, WORKER, 5)
        a.apply(WORKER, pb.BlockEvents(seq=1, sealed=SPANS[5:8], evicted=SPANS[3:4]))
        await finds(b, WORKER, 3)
        names = server.client.keys("kv:*")
        assert len(names) == 7 and all(len(name) == 3 + 16 for name in names), "nobody holds the eighth"
        assert all(0 < server.client.ttl(name) <= KV_TTL_S for name in names)


async def test_long_prompts_are_looked_up_by_samples(server):
    """The longest prefix is found exactly, others to within 16 spans."""
    chain = [hashlib.sha256(b"long%d" % i).digest() for i in range(300)]
    async with index(server, b"one") as one:
        one.join(OTHER, lambda: None)
        await until_async(lambda: len(one._slots.worker_bits.worker_at) == 2)
        for lengths, expected in (
            ((300, 40), (300, 32)), ((250, 250), (250, 250)), ((17, 3), (17, 2)), ((3, 0), (3, 0)), ((64, 63), (64, 48)),
            ((100, 99), (100, 99)),
        ):  # fmt: skip
            server.client.delete("kv:", *server.client.keys("kv:*"))
            for worker, length in zip((WORKER, OTHER), lengths, strict=True):
                entry_of(one, worker).feed.subscribe()
                entry_of(one, worker).feed.spans.clear()
                one.apply(worker, snapshot(*chain[:length]))
            await until_async(lambda: len(server.client.keys("kv:*")) == max(lengths))
            await until_async(lambda: not any(entry.pending for entry in entries_of(one)))

            async def found() -> bool:
                matches = await one.lookup(chain)
                return tuple(map(matches.get, (WORKER, OTHER))) == expected

            await until_async(found)


async def test_two_workers_have_two_slots(server):
    async with index(server, b"a") as a, index(server, b"b", OTHER) as b:
        await until_async(lambda: a.snapshots and b.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:5]))
        b.apply(OTHER, snapshot(*SPANS[:2]))
        await finds(a, OTHER, 2)
        assert (await a.lookup(SPANS))[WORKER] == 5
        assert len(server.client.keys("baton:slot:*")) == 2


async def test_one_gateway_writes(server):
    async with index(server, b"a") as a, index(server, b"b") as b:
        await until_async(lambda: a.snapshots + b.snapshots)
        await asyncio.sleep(0.2)
        assert a.snapshots + b.snapshots == 1, "two gateways write one worker's events"
        writer, reader = (a, b) if a.snapshots else (b, a)
        reader.apply(WORKER, snapshot(*SPANS))
        writer.apply(WORKER, snapshot(*SPANS[:1]))
        await finds(reader, WORKER, 1)


async def test_the_writer_goes_and_another_takes_over(server):
    async with contextlib.AsyncExitStack() as stack:
        async with index(server, b"a") as a:
            await until_async(lambda: a.snapshots)
            b = await stack.enter_async_context(index(server, b"b"))
            await until_async(lambda: not b._joined.is_set())  # its first heartbeat has been
            assert not b.snapshots and server.client.get(b"baton:writer:" + WORKER) == b"a"
        server.client.delete(b"baton:writer:" + WORKER)  # instead of waiting for its time to live
        await until_async(lambda: b.snapshots)
        assert server.client.get(b"baton:writer:" + WORKER) == b"b"


async def test_a_gap_asks_for_a_snapshot(server):
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots == 1)
        a.apply(WORKER, snapshot(*SPANS[:2]))
        a.apply(WORKER, pb.BlockEvents(seq=2, sealed=SPANS[2:4]))
        assert a.snapshots == 2
        a.apply(WORKER, pb.BlockEvents(seq=3, sealed=SPANS[4:5]))
        assert a.snapshots == 2, "one question is enough"
        a.apply(WORKER, snapshot(*SPANS[1:4]))
        await finds(a, WORKER, 3, SPANS[1:])
        await finds(a, WORKER, 0)


async def test_another_secret_refuses(server):
    async with index(server, b"a"):
        with pytest.raises(SecretDiffers):
            await RedisIndex(server.url, b"b").check_secret(b"g" * 16)


async def test_another_secret_there_counts_for_as_long_as_it_is_there(server, caplog, monkeypatch):
    monkeypatch.setattr(redis_index, "_HEARTBEAT_S", 0.05)
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:5]))
        await finds(a, WORKER, 5)
        server.client.set("baton:secret", b"of another cluster")
        await until_async(lambda: a.down == "another cluster secret is in use there")
        assert await a.lookup(SPANS) == {}
        a.apply(WORKER, pb.BlockEvents(seq=1, sealed=SPANS[5:8], evicted=SPANS[3:4]))
        await until_async(lambda: not a._joined.is_set())
        a._joined.set()  # another heartbeat
        await until_async(lambda: not a._joined.is_set())
        assert a.is_disabled and caplog.text.count("not used") == 1
        server.client.delete("baton:secret")
        await until_async(lambda: not a.down)
        await finds(a, WORKER, 3)
        await finds(a, WORKER, 4, SPANS[4:])


async def test_a_dead_redis_is_a_miss(server):
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:5]))
        await finds(a, WORKER, 5)
        server.kill()
        for _ in range(5):
            assert await a.lookup(SPANS) == {}
        assert not a._breaker.is_closed
        server.start()  # empty: everything is written again
        await finds(a, WORKER, 5)


async def test_a_dead_redis_is_known_though_nobody_asks(server):
    """Short prompts look nothing up: the heartbeat finds it, and that it is back."""
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        assert not a.down
        server.kill()
        await until_async(lambda: a.down == "it does not answer")
        server.start()
        await until_async(lambda: not a.down)


async def test_what_is_wrong_with_it_is_told(server):
    """By its name: who reads that it does not answer would look for a dead one."""
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        client = server.client
        rights = {"enabled": True, "nopass": True, "keys": ["*"], "categories": ["+@all"]}
        for told, begin, end in (
            (
                "its memory is full",
                lambda: client.config_set("maxmemory", 1),
                lambda: client.config_set("maxmemory", 0),
            ),
            ("it is a read-only replica", lambda: client.replicaof("::1", "1"), lambda: client.replicaof("NO", "ONE")),
            (
                "the gateway's user there lacks a right",
                lambda: client.acl_setuser("default", **rights, commands=["-mget"]),
                lambda: client.acl_setuser("default", **rights),
            ),
        ):
            begin()
            await until_async(lambda: a.down == told)
            end()
            await until_async(lambda: not a.down)
        client.config_set("requirepass", "right")
        server.url = server.url.replace("//", "//:wrong@")
        async with index(server, b"b") as b:
            await until_async(lambda: b.down)
            assert b.down == "it refuses the gateway's user or password"


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ("-setbit", "the gateway's user there lacks a right"),
        ("-multi", "it answers with an error, which the gateway's log has"),
    ],
)
async def test_what_only_writes_need_is_told_too_and_not_at_every_batch(server, lacks, told, caplog, monkeypatch):
    monkeypatch.setattr(redis_index, "_HEARTBEAT_S", 0.05)
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        rights = {"enabled": True, "nopass": True, "keys": ["*"], "categories": ["+@all"]}
        server.client.acl_setuser("default", **rights, commands=[lacks])
        a.apply(WORKER, snapshot(*SPANS[:5]))
        await until_async(lambda: a.down == told)
        batches, write = [], a._write_batch

        async def counted(*args) -> None:
            batches.append(args)
            await write(*args)

        a._write_batch = counted
        await until_async(lambda: len(batches) > 4)
        assert a.down and caplog.text.count("were not written") == 1
        server.client.acl_setuser("default", **rights)
        await until_async(lambda: not a.down)
        await finds(a, WORKER, 5)


async def test_a_worker_that_begins_anew_has_nothing_unwritten():
    """One that holds nothing has no batch that could say so."""
    made = RedisIndex("redis://127.0.0.1:1/0", b"a")
    made.join(WORKER, lambda: None)
    entry = entry_of(made)
    entry.is_ours, entry.unwritten_for = True, "its memory is full"
    assert made.down == "its memory is full"
    entry.begin(3, 0.0)
    assert not made.down


async def answers(client) -> bool:
    with contextlib.suppress(redis.exceptions.ConnectionError):
        return await client.ping()
    return False


@pytest.mark.parametrize("slot", [b"retired", b"of others", b"too long" * 100], ids=["retired", "others", "long"])
async def test_that_no_slot_is_free_is_told_and_not_at_every_heartbeat(server, slot, caplog, monkeypatch):
    monkeypatch.setattr(redis_index, "_HEARTBEAT_S", 0.05)
    server.client.mset({f"baton:slot:{number}": slot for number in range(NUM_SLOTS)})
    async with index(server, b"a") as a:
        a.join(OTHER, lambda: None)
        await until_async(lambda: a.down == "no slot is free")
        await until_async(lambda: all(entry.num_slots > 5 for entry in entries_of(a)))
        assert a.down == "no slot is free" and caplog.text.count("no slot is free") == 1
        server.client.delete("baton:slot:3", "baton:slot:4")
        monkeypatch.setattr(slot_leases, "GIVE_UP_S", 0.1)  # the slots had others a moment ago
        await until_async(lambda: not a.down)


async def test_what_cannot_be_written_for_long_takes_no_more_and_more_memory(server, monkeypatch):
    """Of a small pool that turns over, where heartbeats succeed and writes do not: once they do, all is right again."""
    monkeypatch.setattr(redis_index, "_HEARTBEAT_S", 0.05)
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS))
        await finds(a, WORKER, 20)
        rights = {"enabled": True, "nopass": True, "keys": ["*"], "categories": ["+@all"]}
        server.client.acl_setuser("default", **rights, commands=["-multi"])
        entry, chains = entry_of(a), [SPANS, *([hashlib.sha256(b"%d" % n).digest()] for n in range(1000))]
        for seq, (old, new) in enumerate(itertools.pairwise(chains), 1):
            a.apply(WORKER, pb.BlockEvents(seq=seq, sealed=new, evicted=old))
            if seq % 100 == 0:
                await until_async(lambda: entry.unwritten_for and len(entry.pending) < 200)
        server.client.acl_setuser("default", **rights)
        await until_async(lambda: entry.num_slots == 2 and not a.down)
        await finds(a, WORKER, 1, chains[-1])
        await finds(a, WORKER, 0)


async def test_what_fails_is_tried_again_at_heartbeats_alone(server, caplog):
    """Not with each event: that took the loop a copy of all that waits, fifty times a second."""
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:5]))
        await finds(a, WORKER, 5)
        server.client.config_set("maxmemory", "1")
        server.client.config_set("maxmemory-policy", "noeviction")
        a.apply(WORKER, pb.BlockEvents(seq=1, sealed=SPANS[5:6]))
        await until_async(lambda: a.down)
        a._written.clear()
        a.apply(WORKER, pb.BlockEvents(seq=2, sealed=SPANS[6:7]))
        assert not a._written.is_set()


class RestoredRedis(RedisServer):
    """It starts with what it has saved."""

    def _argv(self) -> list[str]:
        return [*super()._argv(), "--dbfilename", "saved.rdb"]


@pytest.mark.parametrize("is_written", [False, True])
async def test_one_that_comes_back_with_what_it_saved_before_says_nothing_of_then(is_written, tmp_path, monkeypatch):
    """Its connections fail for less than a heartbeat: nothing else shows that it has forgotten a minute, or a batch. A
    batch that is written before the next heartbeat does not hide it."""
    monkeypatch.setattr(redis_index, "_HEARTBEAT_S", 3.0)
    evicted, held = SPANS[:5], SPANS[5:12]
    with RestoredRedis(tmp_path) as server:
        async with index(server, b"a") as a, index(server, b"b", None) as b:
            await until_async(lambda: a.snapshots)
            a.apply(WORKER, snapshot(*evicted))
            await finds(b, WORKER, 5, evicted)
            await until_async(lambda: server.client.keys("baton:beat:*"))
            server.client.save()
            a.apply(WORKER, pb.BlockEvents(seq=1, sealed=held, evicted=evicted))
            await finds(b, WORKER, 7, held)
            server.kill()
            server.start()
            if is_written:
                await until_async(lambda: answers(a._control))
                a.apply(WORKER, pb.BlockEvents(seq=2, sealed=SPANS[12:13]))
                await until_async(lambda: server.client.exists(b"kv:" + SPANS[12][:16]))
            await finds(b, WORKER, 7, held)
            await finds(b, WORKER, 0, evicted)


async def test_a_frozen_redis_costs_the_budget_and_then_nothing(server):
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:5]))
        await finds(a, WORKER, 5)
        server.freeze()
        asked = 0
        while a._breaker.is_closed:
            assert await a.lookup(SPANS) == {}
            asked += 1
        assert asked == 3

        async def ask(names):
            raise AssertionError("an open breaker sends nothing")

        a._ask = ask
        assert await a.lookup(SPANS) == {}
        del a._ask
        server.thaw()
        await finds(a, WORKER, 5)


@pytest.mark.parametrize("is_slow", [False, True], ids=["lacks a right", "slow"])
async def test_lookups_stay_off_for_as_long_as_they_cannot_succeed(is_slow, server, caplog, monkeypatch):
    """One round trip and other names may do: that turned them on at each heartbeat, and three lookups off again."""
    monkeypatch.setattr(redis_index, "_HEARTBEAT_S", 0.05)
    proxy = FaultProxy(f"127.0.0.1:{server.port}")
    server.url = f"redis://{proxy.address}/0"
    rights = {"enabled": True, "nopass": True, "categories": ["+@all"], "reset_keys": True}
    chain = [hashlib.sha256(b"long%d" % i).digest() for i in range(100)]
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*chain[:70]))
        await finds(a, WORKER, 70, chain)
        if is_slow:
            proxy.delay(0.015)  # there and back twice is more than the budget, and once is less
        else:
            server.client.acl_setuser("default", **rights, keys=["baton:*"])
        caplog.clear()
        beats, try_lookups = [], a._try_lookups

        async def counted() -> None:
            beats.append(1)
            await try_lookups()

        a._try_lookups = counted

        async def asked_for_some_beats() -> bool:
            await a.lookup(chain)
            return len(beats) > 4

        await until_async(asked_for_some_beats)
        assert a.down and caplog.text.count("lookups are") <= 1
        proxy.delay(0.0)
        server.client.acl_setuser("default", **rights, keys=["*"])
        await finds(a, WORKER, 70, chain)
        await until_async(lambda: not a.down)
    proxy.close()


async def test_lookups_that_fail_together_are_one_failure(server):
    """Many at once may take longer than their budget in this process: Redis does not answer worse for that."""
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:5]))
        await finds(a, WORKER, 5)
        server.freeze()
        assert await asyncio.gather(*(a.lookup(SPANS) for _ in range(64))) == [{}] * 64
        assert a._breaker.num_failures == 1
        server.thaw()


async def test_whatever_stands_in_redis_is_survived(server):
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:8]))
        await finds(a, WORKER, 8)
        names = [b"kv:" + span[:16] for span in SPANS]
        server.client.set(names[5], b"\xff" * 100_000)
        await finds(a, WORKER, 5)
        server.client.delete(names[4])
        server.client.lpush(names[4], "not a string")
        await finds(a, WORKER, 4)
        server.client.set(names[3], b"")
        await finds(a, WORKER, 3)
        server.client.set("baton:slot:200", b"an unknown one")
        server.client.lpush("baton:slot:201", "x")
        await asyncio.sleep(1.2)
        await finds(a, WORKER, 3)


async def test_flushall_is_healed(server):
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:6]))
        await finds(a, WORKER, 6)
        server.client.flushall()
        await finds(a, WORKER, 6)


async def test_a_cancelled_lookup_leaves_no_reply_for_another(server, monkeypatch):
    monkeypatch.setattr(redis_index, "BUDGET_S", 60.0)  # however slow this machine is
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS[:6]))
        await finds(a, WORKER, 6)
        for _ in range(50):
            lost = asyncio.create_task(a.lookup(SPANS))
            await asyncio.sleep(0)
            lost.cancel()
            assert await a.lookup(SPANS[3:]) == {WORKER: 3}
            await asyncio.gather(lost, return_exceptions=True)


async def test_without_redis_from_the_start():
    made = RedisIndex("redis://127.0.0.1:1/0", b"a")
    await made.check_secret(b"f" * 16)
    assert await made.lookup(SPANS) == {}


async def test_two_gateways_share_what_they_served(cluster, server):
    """A prompt served through gateway A is found by gateway B, on workers of its own list."""
    async with cluster(num_prefill=2, redis=server.url, split="auto") as a:
        addresses = {
            "prefill_workers": tuple(worker.address for worker in a.prefill),
            "decode_workers": tuple(worker.address for worker in a.decode),
        }
        async with cluster(num_prefill=0, redis=server.url, **{**addresses, "split": "auto"}) as b:
            await until_async(lambda: len(server.client.keys("baton:slot:*")) == 3)
            found = False
            for attempt in range(1, 6):  # on a busy machine Redis may answer after its budget
                prompt = [10 + attempt, *range(10, 329)] * 2
                assert (await generate(a, prompt, max_tokens=3))[-1].usage.cached_tokens == 0
                await until_async(lambda: len(server.client.keys("kv:*")) == 10 * attempt)
                found = found or (await generate(b, prompt, max_tokens=3))[-1].usage.cached_tokens >= 0.9 * len(prompt)
            assert found


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40), st.integers(), st.text(max_size=3)), max_size=12))
def test_longest_runs_of_slots(values):
    slots = [b"%d" % slot if slot % 3 else None for slot in range(NUM_SLOTS)]

    def bit(value, slot: int) -> bool:
        is_there = isinstance(value, bytes) and slot // 8 < len(value) <= NUM_SLOTS // 8
        return is_there and bool(value[slot // 8] & 128 >> slot % 8)

    expected = {}
    for slot in range(NUM_SLOTS):
        run = next((i for i, value in enumerate(values) if not bit(value, slot)), len(values))
        if run and slots[slot]:
            expected[slots[slot]] = run
    assert Matches(bit_sets(values), worker_bits_of(slots)) == expected


@pytest.fixture
def short_lives(monkeypatch):
    """Hours in seconds: a span lives 3 s, a slot rests for 5 s, and one without a writer is retired after 1 s."""
    for module, name, seconds in (
        (redis_index, "KV_TTL_S", 3), (redis_index, "_REFRESH_S", 1.0), (redis_index, "_HEARTBEAT_S", 0.1),
        (redis_index, "WRITER_TTL_S", 1), (redis_index, "GIVE_UP_S", 1.0), (slot_leases, "GIVE_UP_S", 1.0),
        (indexed_worker, "GIVE_UP_S", 1.0), (slot_leases, "ORPHAN_S", 1.0), (slot_leases, "SLOT_TTL_S", 5),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


async def test_a_new_worker_inherits_nothing_of_a_dead_one(server, short_lives):
    """Two hold the same spans, one dies, the other renews them; the next worker with the dead one's slot has
    nothing."""
    async with index(server, b"a") as a:
        a.join(OTHER, lambda: None)
        await until_async(lambda: all(entry.slot is not None for entry in entries_of(a)))
        for worker in (WORKER, OTHER):
            entry_of(a, worker).feed.subscribe()
            a.apply(worker, snapshot(*SPANS))
        await finds(a, WORKER, 20)
        await finds(a, OTHER, 20)
        slot = entry_of(a).slot
        a.drop(WORKER)
        name = f"baton:slot:{slot}"
        await until_async(lambda: server.client.get(name) == slot_leases.RETIRED)
        await until_async(lambda: server.client.get(name) is None)
        kept = [server.client.getbit(b"kv:" + span[:16], slot) for span in SPANS]
        assert kept == [0] * 20, "bits of the dead worker are in its slot, which is free"
        await finds(a, OTHER, 20)
        await until_async(lambda: not a._slots._holders[slot])
        await asyncio.sleep(1.2)  # it stays with its last worker for as long as a writer may be silent
        new = b"n" * 24
        a.join(new, lambda: None)
        await until_async(lambda: entry_of(a, new).slot == slot)
        assert (await a.lookup(SPANS)).get(new, 0) == 0


async def test_one_key_of_another_kind_holds_up_no_others(server):
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        server.client.lpush(b"kv:" + SPANS[3][:16], "no bit string")
        a.apply(WORKER, snapshot(*SPANS))
        await finds(a, WORKER, 3)
        await finds(a, WORKER, 16, SPANS[4:])
        assert not entry_of(a).pending


async def test_a_batch_that_fails_is_written_again(server, caplog):
    """Evictions too, which no snapshot would tell again."""
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS))
        await finds(a, WORKER, 20)
        server.client.config_set("maxmemory", "1")
        server.client.config_set("maxmemory-policy", "noeviction")
        a.apply(WORKER, pb.BlockEvents(seq=1, evicted=SPANS[7:]))
        await until_async(lambda: "index events were not written" in caplog.text)
        server.client.config_set("maxmemory", "0")
        await finds(a, WORKER, 7)


async def test_another_writer_takes_another_slot(server):
    """It cannot know which bits the last one set."""
    async with index(server, b"a") as a:
        await until_async(lambda: a.snapshots)
        a.apply(WORKER, snapshot(*SPANS))
        await finds(a, WORKER, 20)
        slot = entry_of(a).slot
    server.client.delete(b"baton:writer:" + WORKER)
    async with index(server, b"b") as b:
        await until_async(lambda: b.snapshots)
        b.apply(WORKER, snapshot(*SPANS[:4]))
        await finds(b, WORKER, 4)
        assert entry_of(b).slot != slot
        assert server.client.get(f"baton:slot:{slot}") == slot_leases.RETIRED


async def test_a_redis_that_is_not_there_is_told_before_the_first_worker_comes(cluster):
    async with cluster(0, 0, redis="redis://127.0.0.1:1/0") as c:
        await c.until(lambda: c.gateway.index.down == "it does not answer")
