"""Workers that register: with one gateway, by way of Redis with all; those that fall silent are forgotten."""

import asyncio
import socket

import grpc
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.service.errors import BatonError
from baton.v1 import inference_pb2 as pb
from gateway.config.networks import Networks
from gateway.config.settings import GatewaySettings
from gateway.discovery import dial_policy, dns, redis_directory, registration
from gateway.discovery.dial_policy import MAX_TRIALS, DialPolicy
from gateway.discovery.redis_directory import MAX_NAMES, NAME, RedisDirectory
from gateway.discovery.registration import Registrations
from gateway.discovery.session_set import SessionSet
from gateway.link import worker_session
from gateway.link.worker_link import LinkState, WorkerLink
from tests.gateway.calls import PROMPT, expect_refusal, ids_of, start
from tests.support.client import read_error
from tests.support.gateway.fake_worker import FakeWorker, tokens_of
from tests.support.gateway.registration import register, serving_addresses
from tests.support.redis_server import RedisServer


async def join(c, worker: FakeWorker) -> WorkerLink:
    """Let it register, and return its link once it serves."""
    c.workers.append(worker)
    await register(c, worker.address)
    await c.until(lambda: serving_addresses(c) == [worker.address])
    (link,) = c.gateway.registry.links
    return link


async def test_a_worker_that_registers_serves(cluster, digest):
    worker = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 0) as c:
        c.workers.append(worker)
        assert "none has registered" in c.gateway.registry.not_ready()
        assert (await register(c, worker.address)).ttl_s == registration.TTL_S
        await c.until(lambda: serving_addresses(c) == [worker.address])
        await register(c, worker.address)
        answer = await c.stub.Complete(pb.GenerateRequest(text="hello", stopping=pb.Stopping(max_tokens=3)))
        assert answer.usage.output_tokens == 3 and len(c.gateway.registry.links) == 1


async def test_both_roles(cluster, digest):
    workers = [await FakeWorker(role, digest, 400).start() for role in ("prefill", "decode")]
    async with cluster(0, 0) as c:
        c.workers += workers
        for worker in workers:
            await register(c, worker.address, worker.role)
        await c.until(lambda: len(serving_addresses(c)) == 2)
        registry = c.gateway.registry
        assert [link.address for link in registry.prefill] == [workers[0].address]


async def test_one_that_falls_silent_is_forgotten_when_its_session_is_gone(cluster, digest, monkeypatch):
    monkeypatch.setattr(registration, "TTL_S", 0.1)
    worker = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 0, max_start_wait_s=0.2) as c:
        await join(c, worker)
        await c.until(lambda: not c.gateway.registry.registered._until)  # its time is over, and it serves on
        assert serving_addresses(c) == [worker.address]
        await worker.stop()
        await c.until(lambda: not c.gateway.registry.links)
        assert f"no decode worker serves: {worker.address} gone: " in c.gateway.registry.not_ready()


async def test_one_that_is_lost_is_waited_for_as_one_that_is_named(cluster, digest, monkeypatch):
    """Its registration ends and it is dialled in vain, long before it has loaded its model again."""
    monkeypatch.setattr(registration, "TTL_S", 0.1)
    monkeypatch.setattr(dial_policy, "_MAX_FAILED_SESSIONS", 2)
    monkeypatch.setattr(worker_session, "_STARTING_PAUSE_S", 0.02)
    worker = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 0) as c:
        link = await join(c, worker)
        worker.hold("decode")
        running = start(c)
        await c.until(lambda: "admit" in worker.kinds())
        await worker.stop()
        await c.until(lambda: not c.gateway.registry.registered._until)
        await looked(c)
        await c.until(lambda: link.num_failed_sessions > 4 or not c.gateway.registry.links)
        came_later = start(c, request_id="later")
        await c.until(lambda: c.gateway.handler.num_running == 2 or came_later.done())
        worker.release("decode")
        worker.held.clear()
        worker.hello.epoch = worker.epoch = 7
        await worker.start(worker.port)
        assert [ids_of(await each) for each in (running, came_later)] == [tokens_of(PROMPT, 6, 400)] * 2


async def test_one_that_drained_and_went_is_not_waited_for(cluster, digest, monkeypatch):
    monkeypatch.setattr(registration, "TTL_S", 0.1)
    worker = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 0) as c:
        link = await join(c, worker)
        worker.state = "draining"
        await c.until(lambda: link.state is LinkState.DRAINING)
        await worker.stop()
        await c.until(lambda: not c.gateway.registry.links)
        said = await expect_refusal(start(c))
        assert said.code is grpc.StatusCode.UNAVAILABLE and said.reason == "NO_WORKER"


async def test_one_that_comes_back_in_the_other_role_has_one_session(cluster, digest):
    """A process is one worker, whatever it has registered as before: a second session would be refused."""
    worker = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 0) as c:
        registry = c.gateway.registry
        await join(c, worker)
        await worker.stop()
        await c.until(lambda: not serving_addresses(c))
        await register(c, worker.address, "prefill")
        await looked(c)
        worker.hello.roles[:] = ["prefill"]
        worker.hello.epoch = worker.epoch = worker.epoch ^ 1
        await worker.start(worker.port)
        await c.until(lambda: serving_addresses(c))
        assert [link.address for link in registry.links] == [worker.address]
        assert [link.address for link in registry.prefill] == [worker.address]
        await c.until(lambda: len(worker._sessions) == 1)


async def looked(c) -> None:
    """The gateway has looked for workers since."""
    registered, looks = c.gateway.registry.registered, []
    look = registered._look

    async def counted(group) -> None:
        await look(group)
        looks.append(group)

    registered._look = counted
    await c.until(lambda: len(looks) >= 2)
    registered._look = look


@pytest.mark.parametrize(
    ("address", "role", "field"),
    [
        ("127.0.0.1:1", "gateway", "role"),
        ("nowhere", "decode", "address"),
        ("127.0.0.1:0", "decode", "address"),
        pytest.param("127.0.0.1:" + "1" * 5000, "decode", "address", id="a long port"),
    ],
)
async def test_nonsense_is_refused(cluster, address, role, field):
    async with cluster(0, 0) as c:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await register(c, address, role)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()
        assert not c.gateway.registry.links


async def test_too_many_are_refused(cluster, monkeypatch):
    monkeypatch.setattr(registration, "MAX_WORKERS", 1)
    async with cluster(0, 0) as c:
        await register(c, "127.0.0.1:1")
        await register(c, "127.0.0.1:1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await register(c, "127.0.0.1:2")
        assert read_error(caught.value).reason == "TOO_MANY_WORKERS"


async def test_who_registers_with_one_gateway_is_known_to_all(cluster, digest, tmp_path):
    with RedisServer(tmp_path) as server:
        worker = await FakeWorker("decode", digest, 400).start()
        async with cluster(0, 0, redis=server.url) as c, cluster(0, 0, redis=server.url) as other:
            c.workers.append(worker)
            await register(c, worker.address)
            await other.until(lambda: serving_addresses(other) == [worker.address])
            assert server.client.zrange(NAME, 0, -1) == [f"decode {worker.address} {other.fleet.stack}".encode()]


async def test_the_roster_forgets_and_trusts_nothing(tmp_path):
    with RedisServer(tmp_path) as server:
        directory = RedisDirectory(server.url)
        seconds = server.client.time()[0]
        told = {
            "decode 10.0.0.1:5 s": seconds - 5,
            "decode 10.0.0.2:5 s": seconds + 60,
            "decode 10.0.0.3:5": seconds + 60,
            b"\xff\xfe": seconds + 60,
            "decode 10.0.0.8:5 s t": seconds + 60,
            "x": seconds + 60,
        }
        late = {"decode 10.0.0.5:5 s": "inf", "decode 10.0.0.6:5 s": 1e300, "decode 10.0.0.7:5 s": seconds + 3600}
        server.client.zadd(NAME, told | late)
        assert await directory.exchange({("prefill", "10.0.0.4:5", "s"): 9.5}) == {
            ("decode", "10.0.0.2:5", "s"),
            ("decode", "10.0.0.3:5", ""),
            ("prefill", "10.0.0.4:5", "s"),
        }
        assert not set(server.client.zrange(NAME, 0, -1)) & {name.encode() for name in late}
        server.client.delete(NAME)
        server.client.set(NAME, "of the wrong kind")
        here = {("prefill", "10.0.0.4:5", "s"): 9.5}
        assert await directory.exchange(here) == set()
        assert await directory.exchange(here) == set(here), "what no gateway writes there is removed"
        await directory.close()


@pytest.mark.parametrize(
    "lacking",
    (
        {"ZMSCORE": ""},
        {"ZRANGE": "", "ZREVRANGE": "ZRANGE"},  # to which REV is a syntax error, as to ZRANGE before 6.2
    ),
)
async def test_what_an_old_redis_lacks_is_told_by_name(lacking, tmp_path, caplog):
    class OldRedis(RedisServer):
        def _argv(self) -> list[str]:
            renamed = [word for old, new in lacking.items() for word in ("--rename-command", old, new)]
            return [*super()._argv(), *renamed]

    known = {("decode", "10.0.0.2:5", "s")}
    with OldRedis(tmp_path) as server:
        directory = RedisDirectory(server.url)
        assert await directory.exchange({("prefill", "10.0.0.4:5", "s"): 9.5}, known) == set()
        await directory.close()
    assert "it lacks ZMSCORE or ZRANGE with REV, use Redis 6.2 or newer" in caplog.text


async def test_a_right_that_the_directory_lacks_is_told_by_name(tmp_path, caplog):
    with RedisServer(tmp_path) as server:
        server.client.acl_setuser(
            "default", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-zadd"]
        )
        directory = RedisDirectory(server.url)
        assert await directory.exchange({("prefill", "10.0.0.4:5", "s"): 9.5}) == set()
        await directory.close()
    assert "'zadd'" in caplog.text


# ---- strangers ----


async def test_strangers_in_the_directory_cost_next_to_nothing(cluster, digest, tmp_path):
    """20,000 names, reported last, beside a worker that serves and one that comes later."""
    with RedisServer(tmp_path) as server:
        first, second = [await FakeWorker("decode", digest, 400).start() for _ in range(2)]
        async with cluster(0, 0, redis=server.url) as c:
            c.workers += [first, second]
            await register(c, first.address)
            await c.until(lambda: serving_addresses(c) == [first.address])
            seconds = server.client.time()[0]
            ports = [port for port in range(1, 20_001) if f"127.0.0.1:{port}" not in (first.address, second.address)]
            stack = c.fleet.stack
            server.client.zadd(NAME, {f"decode 127.0.0.1:{port} {stack}": seconds + 55 for port in ports})
            process = psutil.Process()
            memory, descriptors, links = process.memory_info().rss, process.num_fds(), c.gateway.registry
            looks, look = [], links.registered._look

            async def counted(group) -> None:
                await look(group)
                looks.append(len(links.links))

            links.registered._look = counted
            await c.until(lambda: len(looks) >= 20)
            await register(c, second.address)
            await c.until(lambda: second.address in serving_addresses(c))
            assert max(looks) <= MAX_TRIALS + 2 and first.address in serving_addresses(c)
            assert process.num_fds() - descriptors < 8 * MAX_TRIALS
            assert process.memory_info().rss - memory < 200 << 20
            server.client.delete(NAME)
            await c.until(lambda: set(serving_addresses(c)) == {link.address for link in links.links})
            await c.until(lambda: process.num_fds() - descriptors < MAX_TRIALS)


async def test_one_that_is_served_by_nobody_is_left_alone_for_a_while(cluster, monkeypatch):
    monkeypatch.setattr(dial_policy, "_MAX_FAILED_SESSIONS", 2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with cluster(0, 0) as c:
            await register(c, address)
            await c.until(lambda: c.gateway.registry.links)
            await c.until(lambda: not c.gateway.registry.links)
            assert f"{address}: UNAVAILABLE" in c.gateway.registry.not_ready()


class Link:
    def __init__(self, state=LinkState.CONNECTING, num_failed_sessions=0):
        self.state, self.num_failed_sessions, self.reason = state, num_failed_sessions, "refused"


def strangers(num: int) -> set:
    return {("decode", f"127.0.0.1:{port}") for port in range(1, num + 1)}


def test_those_that_answered_stay_and_those_that_registered_here_come_first():
    chosen_by, real, new = DialPolicy(), ("decode", "127.0.0.2:1"), ("prefill", "127.0.0.3:1")
    links = {real: Link(LinkState.SERVING)}
    flood = strangers(5000)
    for at in range(100):
        chosen = chosen_by.choose({new}, flood | {real}, links, set(), float(at))
        assert {real, new} <= chosen and len(chosen) <= MAX_TRIALS + 1
        links = {worker: links.get(worker) or Link() for worker in chosen}
        for worker, link in links.items():
            link.num_failed_sessions += worker not in (real, new)
    links[real].state = LinkState.CONNECTING  # lost for a moment
    assert real in chosen_by.choose({new}, flood | {real}, links, set(), 100.0) and real in chosen_by.proven
    links[real].num_failed_sessions = 1000
    for named in (flood | {real}, flood):
        chosen = chosen_by.choose({new}, named, links, {real}, 101.0)
        assert {real, new} <= chosen and len(chosen) <= MAX_TRIALS + 1 and real in chosen_by.proven
    assert real not in chosen_by.choose({new}, flood | {real}, links, set(), 102.0) and real not in chosen_by.proven


def test_a_stranger_is_dialled_ever_more_seldom():
    chosen_by, (worker,) = DialPolicy(), strangers(1)
    tried_at, link = [], None
    for at in range(1000):
        is_chosen = worker in chosen_by.choose(set(), {worker}, {worker: link} if link else {}, set(), float(at))
        if is_chosen and link is None:
            tried_at.append(at)
            link = Link(num_failed_sessions=1000)
        elif not is_chosen:
            link = None
    assert [b - a for a, b in zip(tried_at, tried_at[1:])][:6] == [6, 11, 21, 41, 61, 61]
    assert chosen_by.excuses("decode") == ["127.0.0.1:1: refused"]
    chosen_by.choose(set(), set(), {}, set(), 1000.0)
    assert not chosen_by.excuses("decode") and worker in chosen_by.choose(set(), {worker}, {}, set(), 1000.0)


def make_registered(*cidrs: str) -> Registrations:
    members = {role: SessionSet([], None, None, None, 30.0) for role in ("prefill", "decode")}
    return Registrations(members, None, Networks(cidrs), set, lambda link: "")


@given(
    st.one_of(
        st.tuples(st.text(max_size=20), st.text(max_size=40)),
        st.tuples(
            st.just("decode"),
            st.builds(
                "{}:{}".format,
                st.one_of(st.ip_addresses().map(str), st.text(max_size=12), st.ip_addresses(v=6).map("[{}]".format)),
                st.one_of(st.integers(-5, 70_000).map(str), st.text(max_size=5)),
            ),
        ),
    )
)
def test_only_plain_addresses_of_allowed_networks_are_taken_from_the_roster(worker):
    for each in make_registered("10.0.0.0/8", "fd00::/8")._allowed({worker}):
        host, _, port = each[1].rpartition(":")
        assert each[0] in ("prefill", "decode") and (host.startswith(("10.", "[fd")))
        assert 0 < int(port) < 65536 and each[1].isascii()


def test_a_port_of_many_digits_in_the_roster_is_left_out():
    """int() raises ValueError for it, as for no shorter one."""
    registered = make_registered("10.0.0.0/8")
    assert registered._allowed({("decode", "10.0.0.1:" + "1" * 5000), ("decode", "10.0.0.1:5")}) == {
        ("decode", "10.0.0.1:5")
    }


@pytest.mark.parametrize(
    "address", ["192.0.2.77:5", "[2001:db8::1]:5", "169.254.169.254:80", "0.0.0.0:5", "[::]:5", "[::ffff:192.0.2.77]:5"]
)
async def test_by_default_only_this_host_may_register(cluster, address):
    async with cluster(0, 0) as c:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await register(c, address)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "--worker-networks" in caught.value.details() and "\n" not in caught.value.details()
        assert not c.gateway.registry.registered._until


async def test_the_networks_are_the_operators(cluster):
    async with cluster(0, 0, worker_networks=("192.0.2.0/24", "fd00::/8")) as c:
        await register(c, "192.0.2.77:5")
        await register(c, "[fd00:0::7]:5")
        for address in ("127.0.0.1:5", "192.0.3.1:5", "localhost:5"):
            with pytest.raises(grpc.aio.AioRpcError, match="--worker-networks"):
                await register(c, address)
        told = {address for _, address in c.gateway.registry.registered._until}
        assert told == {"192.0.2.77:5", "[fd00::7]:5"}
    with pytest.raises(ValueError, match="--worker-networks"):
        GatewaySettings(model="x", worker_networks=("300.0.0.0/8",))


async def test_a_name_is_what_it_was_when_it_was_checked(monkeypatch):
    """The address that was found is dialled, never the name: it may mean another one a moment later."""
    found = ["192.0.2.1:5", "10.0.0.9:5"]

    async def addresses_of(host: str, port: str) -> list[str]:
        return found

    monkeypatch.setattr(dns, "addresses_of", addresses_of)
    told = make_registered("10.0.0.0/8")
    await told.note("decode", "worker.example:5")
    assert set(told._until) == {("decode", "10.0.0.9:5")}
    found[:] = ["192.0.2.1:5"]
    with pytest.raises(BatonError, match="--worker-networks"):
        await told.note("decode", "worker.example:5")


async def test_a_dns_that_does_not_answer_holds_nobody_up(monkeypatch):
    async def addresses_of(host: str, port: str) -> list[str]:
        await asyncio.sleep(3600)

    monkeypatch.setattr(dns, "addresses_of", addresses_of)
    monkeypatch.setattr(dns, "RESOLVE_S", 0.05)
    told = make_registered()
    asked = [asyncio.create_task(told.note("decode", f"host{i}.example:5")) for i in range(200)]
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(end, BatonError) and "the DNS" in str(end) for end in ends)
    await told.note("decode", "127.0.0.1:5")
    assert set(told._until) == {("decode", "127.0.0.1:5")}


async def test_the_roster_is_read_within_bounds(tmp_path, monkeypatch):
    read, parse = [], redis_directory._read
    monkeypatch.setattr(redis_directory, "_read", lambda member: read.append(member) or parse(member))
    with RedisServer(tmp_path) as server:
        directory = RedisDirectory(server.url)
        seconds = server.client.time()[0]
        server.client.zadd(NAME, {f"decode 10.0.{i >> 8}.{i & 255}:5 s": seconds + 20 for i in range(20_000)})
        server.client.zadd(NAME, {"decode 10.9.9.9:5 s": seconds + 5})
        found = await directory.exchange({}, [("decode", "10.9.9.9:5", "s"), ("decode", "10.9.9.8:5", "s")])
        assert len(found) == MAX_NAMES + 1 and ("decode", "10.9.9.9:5", "s") in found
        assert len(read) == MAX_NAMES, "and no work is spent on the others"
        server.client.zadd(NAME, {b"decode " + b"x" * (8 << 20): seconds + 30})  # read before all others
        assert await directory.exchange({}, [("decode", "10.9.9.9:5", "s")]) == {("decode", "10.9.9.9:5", "s")}
        await directory.close()
