"""The prefix index at scale, in a real Redis: python bench/index.py [--quick] [--json FILE].

A script inside Redis writes the entries in the gateways' format; everything measured goes through the gateway's own
index. 64 workers hold runs of 256 spans each, so each entry has one bit set and a value of up to 8 bytes; more workers
with the same span would add no entries. 50 million entries are measured if the memory allows, else as many as it
allows."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import contextlib
import random
import statistics
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from baton.v1 import worker_pb2 as pb
from bench.lib.report import Report, finish, percentile_ms, start
from gateway.prefix import redis_index
from gateway.prefix.slot_leases import KV_TTL_S
from gateway.prefix.worker_bitmap import NUM_SLOTS
from tests.support.redis_server import RedisServer

NUM_WORKERS = 64
RUN = 256  # spans of one lookup: 16,384 tokens
SIZES = (1_000_000, 10_000_000, 50_000_000)
CHUNK = 10_000  # per script: Redis answers BUSY to other requests after a script has run for 5 s
UNKNOWN = [b"unknown" + i.to_bytes(25, "big") for i in range(RUN)]
HEARTBEAT_S = 1.2  # of a gateway, plus a little
ENTRY_BYTES = 190  # estimate before the measurement, with a growing table
_FILL = """
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) - 1 do
  local name = 'kv:' .. struct.pack('>I8I8', i * 40503, i)
  redis.call('SETBIT', name, math.floor(i / tonumber(ARGV[3])) % tonumber(ARGV[4]), 1)
  redis.call('EXPIRE', name, tonumber(ARGV[5]))
end
"""


def span(i: int) -> bytes:
    """Return the hash of entry i. The first 16 of its 32 bytes are its name, as the script writes it."""
    return struct.pack(">QQ", i * 40503, i) + bytes(16)


def spans(run: int) -> list[bytes]:
    return [span(i) for i in range(run * RUN, (run + 1) * RUN)]


def worker(n: int) -> bytes:
    return b"%024d" % n


@contextlib.asynccontextmanager
async def gateway(server: RedisServer, num_workers: int) -> AsyncIterator[redis_index.RedisIndex]:
    """Yield the index of one gateway, the first on this Redis, after its workers have joined and got their slots, in
    order."""
    server.client.delete(
        *(b"baton:slot:%d" % n for n in range(NUM_SLOTS)), *(b"baton:writer:" + worker(n) for n in range(num_workers))
    )
    index = redis_index.RedisIndex(server.url, b"g" * 16)
    for n in range(num_workers):
        index.join(worker(n), lambda: None)
    await index.check_secret(b"f" * 16)
    running = asyncio.create_task(index.run())
    try:
        await _until(lambda: _slots_held(server, num_workers))
        await asyncio.sleep(HEARTBEAT_S)  # until the slots are read too
        yield index
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _slots_held(server: RedisServer, num_workers: int) -> bool:
    return all(server.client.mget([b"baton:slot:%d" % n for n in range(num_workers)]))


async def _until(is_true: Callable[[], Awaitable[bool]], pause_s: float = 0.01) -> float:
    """Return the seconds until `is_true`."""
    began = time.perf_counter()
    async with asyncio.timeout(120):
        while not await is_true():
            await asyncio.sleep(pause_s)
    return time.perf_counter() - began


def fill(server: RedisServer, begin: int, end: int) -> None:
    script = server.client.register_script(_FILL)
    for at in range(begin, end, CHUNK):
        script(args=[at, min(end, at + CHUNK), RUN, NUM_WORKERS, 10 * KV_TTL_S])


class Took(NamedTuple):
    wall_s: float
    cpu_s: float  # of this process; Redis has its own


async def looked_up(index: redis_index.RedisIndex, run: int, num_held: int) -> Took:
    """Return the time to look up a prompt that differs after `num_held` spans. The lookup must find the worker and the
    number. It is repeated if the index pauses without Redis, as when its heartbeat is late on a busy machine."""
    hashes = spans(run)[:num_held] + UNKNOWN[num_held:]
    async with asyncio.timeout(120):
        while True:
            began, cpu_began = time.perf_counter(), time.process_time()
            if found := await index.lookup(hashes):
                break
            await asyncio.sleep(0.05)
    took = Took(time.perf_counter() - began, time.process_time() - cpu_began)
    assert found == {worker(run % NUM_WORKERS): num_held}, f"run {run}: {found}"
    return took


def looked_up_bare(server: RedisServer, run: int) -> Took:
    """Look up a whole run by one MGET of a blocking client, without a gateway."""
    names = [b"kv:" + value[:16] for value in spans(run)]
    began, cpu_began = time.perf_counter(), time.process_time()
    server.client.mget(names)
    return Took(time.perf_counter() - began, time.process_time() - cpu_began)


async def at_size(report: Report, server: RedisServer, num_entries: int, num_lookups: int, bytes_before: int) -> None:
    """Measure lookups of one index size. The arms take turns, so that the machine's noise affects all alike."""
    name = f"{num_entries / 1e6:.0f} M entries"
    num_bytes = server.client.info("memory")["used_memory"] - bytes_before
    report.add(f"{name}: memory of an entry", num_bytes / num_entries, "bytes")
    rng = random.Random(1)
    bare, seconds, again = arms = tuple[list[Took], ...]([] for _ in range(3))
    async with gateway(server, NUM_WORKERS) as index:
        for i in range(-50, num_lookups):  # the first ones make connections
            runs, nums = ([rng.randrange(most) for _ in range(3)] for most in (num_entries // RUN, RUN))
            took = [looked_up_bare(server, runs[0])]
            took += [await looked_up(index, run, num + 1) for run, num in zip(runs[1:], nums, strict=False)]
            for times, value in zip(arms, took, strict=True) if i >= 0 else ():
                times.append(value)
    goal = "value < 1" if name == "10 M entries" else ""
    for percentile in (50, 99):
        against, value = (percentile_ms([each.wall_s for each in arm], percentile) for arm in (bare, seconds))
        title = f"{name}: lookup of {RUN} spans, p{percentile}"
        report.add(title, value, "ms", against=against, goal=goal if percentile == 99 else "")
    ours, twice = (percentile_ms([each.wall_s for each in arm], 99) for arm in (seconds, again))
    report.add(f"{name}: A/A, the lookups again, p99", twice, "ms", against=ours)
    means = [1e6 * statistics.fmean(each.cpu_s for each in arm) for arm in arms]
    report.add(f"{name}: lookup of {RUN} spans, CPU beside Redis", means[1], "us", against=means[0])
    report.add(f"{name}: A/A, the lookups again, CPU beside Redis", means[2], "us", against=means[1])


async def writing(report: Report, server: RedisServer, num_spans: int) -> None:
    """Write index events of one worker through one gateway, with lookups of another run meanwhile."""
    async with gateway(server, 1) as index:
        fresh = [b"w%015d" % i + bytes(16) for i in range(num_spans)]
        server.client.delete(b"kv:" + fresh[-1][:16])
        began = time.perf_counter()
        index.apply(worker(0), pb.BlockEvents(seq=0, snapshot=True, sealed=fresh))
        meanwhile: list[float] = []
        while not server.client.exists(b"kv:" + fresh[-1][:16]):
            asked = time.perf_counter()
            await index.lookup(fresh[:RUN])
            meanwhile.append(time.perf_counter() - asked)
            await asyncio.sleep(0.002)
        rate = num_spans / (time.perf_counter() - began)
    report.add("one gateway: spans written", rate, "spans/s")
    report.add(f"lookup of {RUN} spans while it writes, p99", percentile_ms(meanwhile, 99), "ms")
    report.add(
        f"spans that a gateway can keep written, again every {KV_TTL_S / 3:.0f} s", rate * KV_TTL_S / 3 / 1e6, "M spans"
    )


async def after_a_flush(report: Report, server: RedisServer, num_workers: int, num_each: int) -> None:
    """Measure the recovery from FLUSHALL while gateways know what their workers hold."""
    async with gateway(server, num_workers) as index:
        held = {n: [b"%03d%013d" % (n, i) + bytes(16) for i in range(num_each)] for n in range(num_workers)}
        for n, mine in held.items():
            index.apply(worker(n), pb.BlockEvents(seq=0, snapshot=True, sealed=mine))

        async def is_back() -> bool:
            found = [
                await index.lookup(mine[begin : begin + RUN]) for mine in held.values() for begin in (0, num_each - RUN)
            ]
            owners = [n for n in held for _ in (0, 1)]
            return sum(each.get(worker(n), 0) == RUN for each, n in zip(found, owners, strict=True)) >= 0.9 * len(found)

        await _until(is_back)
        server.client.flushall()
        seconds = await _until(is_back)
    report.add(
        f"flushed, {num_workers} workers, {num_workers * num_each:,} spans: 90 % found again",
        seconds,
        "s",
        goal="value < 30",
    )


async def of_the_dead(report: Report, server: RedisServer) -> None:
    """Check that old entries of a worker that restarted with a new epoch, whose slot is free, name no worker."""
    async with gateway(server, 2) as index:
        hashes = [b"d%015d" % i + bytes(16) for i in range(RUN)]
        index.apply(worker(1), pb.BlockEvents(seq=0, snapshot=True, sealed=hashes))

        async def is_found() -> bool:
            return (await index.lookup(hashes)).get(worker(1)) == RUN

        await _until(is_found)
        index.drop(worker(1))
        server.client.delete("baton:slot:1")  # as when its lease expires
        await asyncio.sleep(HEARTBEAT_S)  # until the slots are read again
        found = await index.lookup(hashes)
    report.add("spans that still name a worker whose slot is given up", sum(found.values()), "spans", goal="value <= 0")


def affordable(num_entries: int, filled: int) -> int:
    """Return as many entries, in whole runs, as take half of the memory that was free before `filled` of them."""
    free = psutil.virtual_memory().available + filled * ENTRY_BYTES
    return min(num_entries, free // 2 // ENTRY_BYTES) // RUN * RUN


def main() -> int:
    arguments, report = start("index", "The prefix index at scale, in a real Redis.")
    # So that every lookup is measured to its end: a gateway continues without the index after 50 ms.
    redis_index.BUDGET_S = 10.0
    num_lookups = 300 if arguments.quick else 3000
    sizes = SIZES[:1] if arguments.quick else SIZES
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        bytes_before, filled = server.client.info("memory")["used_memory"], 0
        for wanted in sizes:
            num_entries = affordable(wanted, filled)
            if num_entries <= filled:
                break
            began = time.perf_counter()
            fill(server, filled, num_entries)
            rate = (num_entries - filled) / (time.perf_counter() - began)
            report.add(f"{num_entries / 1e6:.0f} M entries: written by a script inside Redis", rate, "spans/s")
            filled = num_entries
            uvloop.run(at_size(report, server, num_entries, num_lookups, bytes_before))
        uvloop.run(writing(report, server, 20_000 if arguments.quick else 200_000))
        server.client.flushall(asynchronous=True)  # with 50 million entries it takes longer than a client waits
        num_each = 2_000 if arguments.quick else 20_000
        uvloop.run(after_a_flush(report, server, 16, num_each))
        uvloop.run(of_the_dead(report, server))
    return finish(arguments, report)


if __name__ == "__main__":
    raise SystemExit(main())
