"""The index against a model of blocks and workers: after any events it becomes true again, and holds nothing
else.

Redis and the clock are the test's own, so that hours pass in a second; tests/gateway/prefix/test_redis_index.py has a
real one.
"""

import asyncio
import itertools
import math
import random

import pytest
import redis.exceptions

from baton.v1 import worker_pb2 as pb
from gateway.prefix import redis_index
from gateway.prefix.prefix_index import Feed
from gateway.prefix.redis_index import RedisIndex
from gateway.prefix.slot_leases import GIVE_UP_S, KV_TTL_S, ORPHAN_S, RETIRED, SLOT_TTL_S
from gateway.store.redis_client import MAX_BATCH
from tests.support.gateway.redis_index import entries_of, entry_of

SPANS = [b"%016d" % n + bytes(16) for n in range(12)]
BEAT_S = 1.0
SETTLED_S = 4.0  # of heartbeats and batches, once faults end
STEP_S = 0.5


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """The contents of one Redis: (value, when it expires)."""

    def __init__(self, clock: Clock):
        self._clock, self._data = clock, {}

    def get(self, name: bytes) -> bytes | None:
        value, over_at = self._data.get(name, (None, 0.0))
        return value if value is not None and self._clock() < over_at else None

    def set(self, name: bytes, value: bytes, over_at: float | None = None) -> None:
        before = self._data.get(name, (None, float("inf")))[1] if self.get(name) is not None else float("inf")
        self._data[name] = (value, before if over_at is None else over_at)

    def setbit(self, name: bytes, bit: int, value: int) -> None:
        data = bytearray(self.get(name) or b"").ljust(bit // 8 + 1, b"\0")
        data[bit // 8] = data[bit // 8] & ~(128 >> bit % 8) | (128 >> bit % 8) * value
        self.set(name, bytes(data))

    def expire(self, name: bytes, seconds: int) -> bool:
        if (value := self.get(name)) is not None:
            self.set(name, value, self._clock() + seconds)
        return value is not None

    def set_if(self, name: bytes, value: bytes, nx: bool = False, xx: bool = False, ex: int = 0) -> bool | None:
        is_there = self.get(name) is not None
        if (nx and is_there) or (xx and not is_there):
            return None
        self.set(name, value, self._clock() + ex)
        return True

    def names(self) -> list[bytes]:
        return [name for name in self._data if self.get(name) is not None]

    def forget(self, name: bytes) -> None:
        del self._data[name]

    def clear(self) -> None:
        self._data.clear()


class Client:
    """One gateway's connections to it, which may fail before or after a call is carried out."""

    def __init__(self, memory: Memory, clock: Clock):
        self._memory, self._clock = memory, clock
        self.is_cut = self.loses_answers = self.refuses_bits = False
        self.trip_s = 0.0
        self.num_trips = self.num_commands = 0

    async def _do(self, work, num_commands: int = 1):
        self.num_trips, self.num_commands = self.num_trips + 1, self.num_commands + num_commands
        await asyncio.sleep(0)
        self._clock.now += self.trip_s
        if self.is_cut:
            raise redis.exceptions.ConnectionError("cut")
        done = work()
        if self.loses_answers:
            raise redis.exceptions.TimeoutError("no answer")
        return done

    async def mget(self, names):
        return await self._do(lambda: [self._memory.get(name) for name in names])

    async def set(self, name, value, **options):
        return await self._do(lambda: self._memory.set_if(name, value, **options))

    async def expire(self, name, seconds):
        return await self._do(lambda: self._memory.expire(name, seconds))

    async def ping(self):
        return await self._do(lambda: True)

    async def aclose(self):
        pass

    def pipeline(self, transaction):
        if transaction and self.refuses_bits:
            raise redis.exceptions.OutOfMemoryError("OOM")
        return Batch(self)


class Batch:
    def __init__(self, client: Client):
        self._client, self._work = client, []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    def setbit(self, *args):
        self._work.append(lambda memory: memory.setbit(*args))

    def set(self, name, value, **options):
        value = b"%d" % value if isinstance(value, int) else value
        self._work.append(lambda memory: memory.set_if(name, value, **options))

    def getrange(self, name, begin, end):
        self._work.append(lambda memory: (memory.get(name) or b"")[begin : end + 1])

    def expire(self, *args):
        self._work.append(lambda memory: memory.expire(*args))

    async def execute(self, raise_on_error):
        return await self._client._do(lambda: [work(self._client._memory) for work in self._work], len(self._work))


class Worker:
    """A worker's blocks, and the sessions that it reports them to."""

    def __init__(self, number: int):
        self.id = b"%024d" % number
        self.held: set[bytes] = set()
        self.is_alive = True
        self.seqs: dict[Gateway, int] = {}  # of those that have subscribed

    def change(self, sealed=(), evicted=()) -> None:
        self.held = (self.held | set(sealed)) - set(evicted)
        for gateway, seq in self.seqs.items():
            self.seqs[gateway] += 1
            gateway.index.apply(self.id, pb.BlockEvents(seq=seq, sealed=sealed, evicted=evicted))


class Gateway:
    def __init__(self, number: int, memory: Memory, clock: Clock):
        self.index = RedisIndex("redis://127.0.0.1:1/0", b"gateway%d" % number)
        self.client = Client(memory, clock)
        self.index._hot = self.index._control = self.index._slots._client = self.client
        self.sessions: set[Worker] = set()
        self.is_frozen = False
        self.heard_at = 0.0
        self._asked: list[Worker] = []

    def join(self, worker: Worker) -> None:
        self.sessions.add(worker)
        self.index.join(worker.id, lambda: self._asked.append(worker))

    def leave(self, worker: Worker) -> None:
        self.sessions.discard(worker)
        worker.seqs.pop(self, None)
        self.index.drop(worker.id)

    async def live(self) -> None:
        """A heartbeat, what workers answer to it, and a batch: what its tasks do again and again."""
        if self.is_frozen:
            return
        await self.index._beat_once()
        if not self.index._lost_for:
            self.heard_at = redis_index.now()
        asked, self._asked = self._asked, []
        for worker in asked:
            if worker in self.sessions:
                worker.seqs[self] = 1
                self.index.apply(worker.id, pb.BlockEvents(seq=0, snapshot=True, sealed=sorted(worker.held)))
        for entry in entries_of(self.index):
            if self.index._may_write(entry):
                await self.index._write_pending(entry)

    async def told(self) -> dict[bytes, set[bytes]]:
        """Worker -> the spans that the index says it holds."""
        found: dict[bytes, set[bytes]] = {}
        for span in SPANS:
            for worker in await self.index.lookup([span]):
                found.setdefault(worker, set()).add(span)
        return found


class World:
    def __init__(self, seed: int, clock: Clock):
        self.rng, self.clock, self.memory = random.Random(seed), clock, Memory(clock)
        self._numbers = itertools.count()
        self.gateways = [self._gateway() for _ in range(2)]
        self.workers: list[Worker] = []
        self.forgot_at = 0.0

    def _gateway(self) -> Gateway:
        return Gateway(next(self._numbers), self.memory, self.clock)

    async def pass_time(self, seconds: float) -> None:
        over_at = self.clock.now + seconds
        step_s = STEP_S if seconds < 60 else 3.0
        while self.clock.now < over_at:
            self.clock.now += step_s
            for gateway in self.gateways:
                await gateway.live()

    def add_worker(self) -> None:
        self.workers.append(Worker(next(self._numbers)))
        for gateway in self.gateways:
            gateway.join(self.workers[-1])

    # ---- what may happen ----

    def seal(self) -> None:
        if worker := self._any():
            worker.change(sealed=[span for span in self._some() if span not in worker.held])

    def evict(self) -> None:
        if worker := self._any():
            worker.change(evicted=[span for span in self._some() if span in worker.held])

    def a_worker_comes(self) -> None:
        if len(self.workers) < 5:
            self.add_worker()

    def a_worker_dies(self) -> None:
        if worker := self._any():
            self.workers.remove(worker)
            for gateway in self.gateways:
                if worker in gateway.sessions:
                    gateway.leave(worker)

    def a_session_breaks(self) -> None:
        gateway = self.rng.choice(self.gateways)
        if (worker := self._any()) and worker in gateway.sessions:
            gateway.leave(worker)

    def sessions_come_back(self) -> None:
        for gateway in self.gateways:
            for worker in self.workers:
                if worker not in gateway.sessions:
                    gateway.join(worker)

    def a_gateway_dies(self) -> None:
        """Unless Redis was emptied a moment before: what it wrote since is lost."""
        if min(gateway.heard_at for gateway in self.gateways) <= self.forgot_at:
            return
        dead = self.gateways.pop(self.rng.randrange(len(self.gateways)))
        for worker in self.workers:
            worker.seqs.pop(dead, None)
        self.gateways.append(self._gateway())
        self.sessions_come_back()

    def a_connection_fails(self) -> None:
        client = self.rng.choice(self.gateways).client
        client.is_cut = client.loses_answers = client.refuses_bits = False
        setattr(client, self.rng.choice(["is_cut", "loses_answers", "refuses_bits"]), True)

    def connections_come_back(self) -> None:
        for gateway in self.gateways:
            gateway.client.is_cut = gateway.client.loses_answers = gateway.client.refuses_bits = False

    def a_gateway_freezes(self) -> None:
        self.rng.choice(self.gateways).is_frozen = True

    def gateways_thaw(self) -> None:
        for gateway in self.gateways:
            gateway.is_frozen = False

    def redis_forgets(self) -> None:
        self.memory.clear()
        self.forgot_at = self.clock.now

    def _any(self) -> Worker | None:
        return self.rng.choice(self.workers) if self.workers else None

    def _some(self) -> list[bytes]:
        return self.rng.sample(SPANS, self.rng.randrange(1, 5))

    # ---- what must be so ----

    async def settle(self) -> None:
        self.connections_come_back()
        self.gateways_thaw()
        self.sessions_come_back()
        await self.pass_time(SETTLED_S + redis_index.WRITER_TTL_S)

    async def check(self) -> None:
        """Each gateway says of each worker that lives just what it holds."""
        expected = {worker.id: worker.held for worker in self.workers if worker.held}
        living = {worker.id for worker in self.workers}
        for gateway in self.gateways:
            told = {worker: spans for worker, spans in (await gateway.told()).items() if worker in living}
            assert told == expected

    def check_slots(self) -> None:
        """On a slot that is free no bit is set, but where Redis has forgotten whose it is and they have not yet."""
        entries = [
            each for gateway in self.gateways for each in (*entries_of(gateway.index), *gateway.index._left.values())
        ]
        returning = {entry.slot for entry in entries if entry.held_at <= self.forgot_at}
        taken = {
            int(name.removeprefix(b"baton:slot:")) for name in self.memory.names() if name.startswith(b"baton:slot:")
        }
        for name in self.memory.names():
            if name.startswith(b"kv:"):
                bits = "".join(f"{byte:08b}" for byte in self.memory.get(name))
                assert {slot for slot, bit in enumerate(bits) if bit == "1"} <= taken | returning


OFTEN = (
    [World.seal] * 6 + [World.evict] * 4 + [World.sessions_come_back, World.connections_come_back, World.gateways_thaw]
)
SELDOM = [
    World.a_worker_comes, World.a_worker_dies, World.a_session_breaks, World.a_gateway_dies, World.a_connection_fails,
    World.a_gateway_freezes, World.redis_forgets,
]  # fmt: skip
PAUSES_S = (0, 0, 0, 0.5, 0.5, 1, 2, 7, GIVE_UP_S - 1, GIVE_UP_S + 1, ORPHAN_S + 20, KV_TTL_S / 3 + 1, SLOT_TTL_S)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(redis_index, "now", clock)
    monkeypatch.setattr(redis_index, "BUDGET_S", 60.0)  # however slow this machine is
    return clock


async def play(seed: int, clock: Clock, num_acts: int) -> None:
    world = World(seed, clock)
    for _ in range(3):
        world.a_worker_comes()
    await world.settle()
    for number in range(num_acts):
        world.rng.choice(OFTEN if world.rng.random() < 0.7 else SELDOM)(world)
        await world.pass_time(world.rng.choice(PAUSES_S[:7] if world.rng.random() < 0.9 else PAUSES_S))
        world.check_slots()
        if number % 8 == 7:
            await world.settle()
            await world.check()


@pytest.mark.parametrize("seed", range(8))
async def test_the_index_becomes_right_again(seed, clock):
    await play(seed, clock, 48)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 104))
async def test_the_index_becomes_right_again_for_long(seed, clock):
    for part in range(20):
        await play(1000 * seed + part, clock, 80)


async def test_a_new_worker_inherits_nothing(clock):
    """A and B hold the same spans, and A dies; B renews them for hours; C comes, empty, and gets A's slot."""
    world = World(1, clock)
    for _ in range(2):
        world.a_worker_comes()
    for worker in world.workers:
        worker.change(sealed=SPANS)
    await world.settle()
    await world.check()
    world.rng = random.Random(0)
    first = world.workers[0]
    slots = {
        entry.worker: entry.slot for gateway in world.gateways for entry in entries_of(gateway.index) if entry.is_ours
    }
    world.workers.remove(first)
    for gateway in world.gateways:
        gateway.leave(first)
    await world.pass_time(ORPHAN_S + 20)
    assert world.memory.get(b"baton:slot:%d" % slots[first.id]) == RETIRED
    await world.pass_time(3 * SLOT_TTL_S)
    assert world.memory.get(b"baton:slot:%d" % slots[first.id]) is None
    world.a_worker_comes()
    await world.settle()
    assert world.memory.get(b"baton:slot:%d" % slots[first.id]) == world.workers[-1].id
    await world.check()


async def test_what_nobody_holds_takes_no_memory(clock):
    """Neither a span that was evicted, nor one that has expired before it is."""
    world = World(1, clock)
    for _ in range(2):
        world.a_worker_comes()
    first, second = world.workers
    first.change(sealed=SPANS)
    second.change(sealed=SPANS[:4])
    await world.settle()
    first.change(evicted=SPANS)
    await world.settle()
    await world.check()
    assert {name for name in world.memory.names() if name.startswith(b"kv:")} == {b"kv:" + s[:16] for s in SPANS[:4]}
    world.memory.clear()
    second.change(evicted=SPANS[:4])
    await world.settle()
    assert not any(name.startswith(b"kv:") for name in world.memory.names())


async def test_an_eviction_is_written_though_the_first_time_fails(clock):
    world = World(1, clock)
    world.a_worker_comes()
    (worker,) = world.workers
    worker.change(sealed=SPANS)
    await world.settle()
    for gateway in world.gateways:
        gateway.client.is_cut = True
    worker.change(evicted=SPANS[3:])
    await world.pass_time(2)
    await world.settle()
    await world.check()


async def test_what_redis_has_lost_a_part_of_is_written_again(clock):
    world = World(1, clock)
    world.a_worker_comes()
    world.workers[0].change(sealed=SPANS)
    await world.settle()
    for gateway in world.gateways:
        gateway.client.is_cut = True
    await world.pass_time(2)
    world.memory.forget(b"kv:" + SPANS[3][:16])
    await world.settle()
    await world.check()


async def test_slots_that_were_read_long_ago_name_nobody(clock):
    """Only the connection that reads them is cut: who has them by now is not known."""
    world = World(1, clock)
    world.a_worker_comes()
    world.workers[0].change(sealed=SPANS)
    await world.settle()
    (reader,) = [gateway for gateway in world.gateways if not entry_of(gateway.index, world.workers[0].id).is_ours]
    cut = Client(world.memory, clock)
    cut.is_cut = True
    reader.index._control = reader.index._slots._client = cut
    await world.pass_time(KV_TTL_S / 2)
    await world.check()
    await world.pass_time(KV_TTL_S / 2 + 3)
    assert not await reader.told()


async def test_a_writer_stays_one(clock):
    """Whoever is asked first: another one would take another slot, and a snapshot."""
    world = World(1, clock)
    world.a_worker_comes()
    await world.settle()
    worker = world.workers[0].id
    world.gateways.sort(key=lambda gateway: entry_of(gateway.index, worker).is_ours)
    writer = world.memory.get(b"baton:writer:" + worker)
    await world.pass_time(3 * redis_index.WRITER_TTL_S)
    assert world.memory.get(b"baton:writer:" + worker) == writer
    assert entry_of(world.gateways[-1].index, worker).num_slots == 1


async def test_a_slow_redis_uses_up_no_slots(clock):
    """Heartbeats take longer there than names of writers last: gateways took the workers from each other in turn."""
    world = World(1, clock)
    for _ in range(3):
        world.a_worker_comes()
    for worker in world.workers:
        worker.change(sealed=SPANS)
    await world.settle()
    for gateway in world.gateways:
        gateway.index._fingerprint, gateway.client.trip_s = b"f" * 16, 0.5
    for _ in range(120):
        clock.now += BEAT_S
        await asyncio.gather(*(gateway.live() for gateway in world.gateways))
    assert {gateway.index.down for gateway in world.gateways} == {"it does not answer in time"}
    for gateway in world.gateways:
        gateway.client.trip_s = 0.0
    await world.settle()
    await world.check()
    entries = [entry for gateway in world.gateways for entry in entries_of(gateway.index)]
    assert sum(entry.num_slots for entry in entries) <= 2 * len(world.workers)


async def test_what_is_evicted_while_no_session_stands_is_written(clock):
    world = World(1, clock)
    world.a_worker_comes()
    world.a_worker_comes()
    worker, _other = world.workers
    for each in world.workers:
        each.change(sealed=SPANS)
    await world.settle()
    for gateway in world.gateways:
        gateway.leave(worker)
    worker.change(evicted=SPANS[3:])
    await world.pass_time(3)
    await world.settle()
    await world.check()
    names = {bytes(name) for name in world.memory.names() if name.startswith(b"baton:slot:")}
    assert len(names) == 2, "its slot was good still"


async def test_the_feed_tells_what_was_evicted_between_two_sessions():
    feed = Feed(lambda: None)
    feed.subscribe()
    feed.apply(pb.BlockEvents(seq=0, snapshot=True, sealed=[b"a", b"b"]))
    feed.join(lambda: None)
    assert feed.apply(pb.BlockEvents(seq=1, sealed=[b"z"])) == ((), ())
    feed.subscribe()
    assert feed.apply(pb.BlockEvents(seq=0, snapshot=True, sealed=[b"b", b"c"])) == ((b"c",), (b"a",))


@pytest.mark.parametrize("num_workers", (3, 200, 600))
async def test_a_heartbeat_is_a_few_round_trips_however_many_workers_there_are(num_workers, clock):
    """With some for each worker, 150 of them and a Redis 15 ms away outlasted the leases of writers."""
    world = World(1, clock)
    for _ in range(num_workers):
        world.add_worker()
    await world.settle()
    writer, reader = sorted(world.gateways, key=lambda gateway: -sum(e.is_ours for e in entries_of(gateway.index)))
    for gateway in (writer, reader):
        gateway.client.num_trips = gateway.client.num_commands = 0
        await gateway.live()
    parts = math.ceil(num_workers / MAX_BATCH)
    assert 0 <= writer.client.num_trips - (3 * parts + 1) <= 1, "now and then it looks for slots without a writer"
    assert writer.client.num_commands - writer.client.num_trips == 2 * num_workers - 2 * parts
    assert 0 <= reader.client.num_trips - (parts + 1) <= 1
    assert reader.client.num_commands == reader.client.num_trips, "who holds nothing renews nothing"


async def test_workers_that_come_at_once_have_slots_within_a_few_round_trips(clock):
    """As have those that another gateway takes over."""
    world = World(1, clock)
    for _ in range(200):
        world.add_worker()
    for gateway in world.gateways:
        gateway.client.num_trips = 0
        await gateway.live()
        assert gateway.client.num_trips < 20
        assert len({entry.slot for entry in entries_of(gateway.index)} - {None}) == 200
        clock.now += redis_index.WRITER_TTL_S  # it is dead
    values = [world.memory.get(name) for name in world.memory.names() if name.startswith(b"baton:slot:")]
    assert sorted(values) == sorted([worker.id for worker in world.workers] + [RETIRED] * 200)


async def test_gateways_that_begin_at_once_share_the_slots(clock):
    """Each asks for some that the other has taken a moment before."""
    world = World(1, clock)
    for gateway, begin in zip(world.gateways, (0, 100), strict=True):
        for number in range(begin, begin + 100):
            gateway.join(Worker(number))
    await asyncio.gather(*(gateway.live() for gateway in world.gateways))
    slots = [entry.slot for gateway in world.gateways for entry in entries_of(gateway.index)]
    assert sorted(slots) == list(range(200))
