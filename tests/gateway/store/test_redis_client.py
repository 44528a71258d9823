"""A call to Redis fails within its time and takes little memory, with any server or answer behind the address."""

import asyncio
import contextlib
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ReadOnlyError

from gateway.discovery.redis_directory import RedisDirectory
from gateway.prefix import redis_index
from gateway.prefix.redis_index import RedisIndex
from gateway.store.redis_client import FAILURES, MAX_REPLY_BYTES, make_client, values_of
from gateway.store.redis_url import without_password
from tests.support.pace import patience
from tests.support.redis_server import RedisServer

TIMEOUT_S = 0.3
CHUNK = b"0" * 65_536
ENDLESS = {
    "a value of 1 GB": (b"$1073741824\r\n", CHUNK),
    "a value of 1 GB, in a list": (b"*2\r\n$1\r\na\r\n$1073741824\r\n", CHUNK),
    "a list of a thousand million": (b"*1000000000\r\n", b":1\r\n" * 10_000),
    "lists of lists": (b"", b"*9\r\n" * 10_000),
    "a map": (b"%1000000000\r\n", b":1\r\n:2\r\n" * 10_000),
    "a set": (b"~1000000000\r\n", b":1\r\n" * 10_000),
    "a push": (b">1000000000\r\n", b":1\r\n" * 10_000),
    "pushes": (b"", b">1\r\n$1\r\nx\r\n" * 10_000),
    "attributes": (b"|1000000000\r\n", b":1\r\n:2\r\n" * 10_000),
    "a line": (b"+", CHUNK),
    "an error": (b"-ERR ", CHUNK),
    "a number": (b":", CHUNK),
    "a large number": (b"(", CHUNK),
    "garbage": (b"", b"\x00\xff\r\n" * 10_000),
    "nothing": (b"", b""),
}
ANSWERS = [
    b"+OK\r\n", b"-ERR no\r\n", b"-WRONGTYPE x\r\n", b":7\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"$0\r\n\r\n", b"_\r\n", b",nan\r\n",
    b"#t\r\n", b"*1\r\n$-1\r\n", b"*2\r\n*1\r\n+a\r\n-ERR\r\n", b"%1\r\n+a\r\n+b\r\n", b"~1\r\n:1\r\n", b">1\r\n+x\r\n", b"=7\r\ntxt:abc\r\n",
    b"$5\r\nabc", b"*3\r\n:1\r\n", b"!3\r\nERR\r\n", b"*2\r\n$3\r\n1e9\r\n$1\r\nx\r\n",
]  # fmt: skip


class FakeRedis:
    """Answers every call with `head` (or `first`, the first of a connection), and `body` after a pause; an endless one
    again and again, as long as it is read."""

    def __init__(
        self, head: bytes, body: bytes = b"", is_endless: bool = False, pause_s: float = 0.0, first: bytes = b""
    ):
        self._head, self._body, self._is_endless, self._pause_s = head, body, is_endless, pause_s
        self._first = first
        self.num_sent = self.num_open = 0

    async def __aenter__(self) -> "FakeRedis":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *exc) -> None:
        self._server.close()
        async with asyncio.timeout(10):
            while self.num_open:
                await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        head = self._first or self._head
        with contextlib.suppress(ConnectionError):
            while await reader.read(65_536):
                writer.write(head)
                head = self._head
                await asyncio.sleep(self._pause_s)
                writer.write(self._body)
                while self._body and self._is_endless:
                    writer.write(self._body)
                    self.num_sent += len(self._body)
                    await writer.drain()
                    await asyncio.sleep(self._pause_s)
                await writer.drain()
        writer.close()
        self.num_open -= 1


@pytest.mark.parametrize("said", ENDLESS)
async def test_what_never_ends_is_given_up(said):
    """The socket buffers of both ends take some; what is read beyond the bound is one read."""
    async with FakeRedis(*ENDLESS[said], is_endless=True) as fake:
        client = make_client(fake.url, TIMEOUT_S, 1)
        memory = psutil.Process().memory_info().rss
        began = time.thread_time()
        for _ in range(3):
            with pytest.raises(FAILURES):
                async with asyncio.timeout(20):
                    await client.get("a")
        assert fake.num_sent < 3 * (MAX_REPLY_BYTES + (16 << 20))
        assert time.thread_time() - began < 2.0  # 10 s of the parser's for a thousand million
        assert psutil.Process().memory_info().rss - memory < 100 << 20
        await client.aclose()


@pytest.mark.parametrize("cut", range(1, 10))
async def test_a_list_that_is_announced_in_pieces_is_seen(cut):
    async with FakeRedis(b"*100000000\r\n"[:cut], b"*100000000\r\n"[cut:], pause_s=0.02) as fake:
        client = make_client(fake.url, 5.0, 1)
        with pytest.raises(FAILURES, match="very many parts"):
            await client.get("a")
        await client.aclose()


@pytest.mark.parametrize("cut", (1, 5))
async def test_a_list_that_begins_behind_the_reply_before_is_seen(cut):
    """hiredis keeps what it has not parsed, and goes on there with the next call. The first are those of connecting."""
    async with FakeRedis(b"*100000000\r\n"[cut:], first=b"+OK\r\n" + b"*100000000\r\n"[:cut]) as fake:
        client = make_client(fake.url, 5.0, 1)
        with pytest.raises(FAILURES, match="very many parts"):
            await client.get("a")
        await client.aclose()


async def test_a_list_that_is_announced_byte_by_byte_is_seen():
    async with FakeRedis(b"*", b"1", is_endless=True, pause_s=0.02) as fake:
        client = make_client(fake.url, 5.0, 1)
        with pytest.raises(FAILURES, match="very many parts"):
            await client.get("a")
        await client.aclose()


@pytest.mark.parametrize("said", ENDLESS)
async def test_index_and_roster_go_on_without_it(said, monkeypatch):
    monkeypatch.setattr(redis_index, "_CONTROL_TIMEOUT_S", 0.1)
    async with FakeRedis(*ENDLESS[said], is_endless=True) as fake, asyncio.timeout(60):
        index, directory = RedisIndex(fake.url, b"g" * 16), RedisDirectory(fake.url)
        await index.check_secret(b"f" * 16)
        index.join(b"w" * 24, lambda: None)
        running = asyncio.create_task(index.run())
        assert await directory.exchange({("decode", "127.0.0.1:5", "s"): 9.0}) == set()
        assert await index.lookup([bytes(32)] * 40) == {}
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await directory.close()


@given(st.lists(st.one_of(st.sampled_from(ANSWERS), st.binary(max_size=60)), max_size=6).map(b"".join))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_miss_at_worst(answer):
    async def ask() -> None:
        async with FakeRedis(answer) as fake:
            index, directory = RedisIndex(fake.url, b"g" * 16), RedisDirectory(fake.url)
            for client in (index._hot, index._control, directory._client):
                client.connection_pool.connection_kwargs["socket_timeout"] = 0.02
                client.connection_pool.connection_kwargs["socket_connect_timeout"] = 0.02
            with contextlib.suppress(FAILURES):
                await values_of(index._control, [b"a", b"b"], 24)
            index.join(b"w" * 24, lambda: None)
            with contextlib.suppress(FAILURES):
                await index._heartbeat(0.0)
            found = await directory.exchange({("decode", "127.0.0.1:5", "s"): 9.0})
            assert all(isinstance(part, str) for worker in found for part in worker)
            matches = await index._ask([bytes(32)] * 40)
            assert not matches or set(matches) <= {b"w" * 24}
            for client in (index._hot, index._control):
                await client.aclose()
            await directory.close()

    asyncio.run(ask())


async def test_answers_that_trickle_do_not_add_up(monkeypatch):
    """Each of a batch within its time, and together no longer than one."""
    monkeypatch.setattr(redis_index, "_CONTROL_TIMEOUT_S", 0.3)
    async with FakeRedis(b"+OK\r\n", b"+OK\r\n", is_endless=True, pause_s=0.05) as fake:
        index = RedisIndex(fake.url, b"g" * 16)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await index._write_batch(3, {b"%032d" % n: True for n in range(200)})
        for client in (index._hot, index._control):
            await client.aclose()


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


async def test_values_that_are_too_long_hide_no_others(server):
    """512 MB are the most that Redis holds in one; 64 MB here."""
    server.client.mset({"a": b"1", "c": b"22", "d": b"4444"})
    server.client.setrange("b", 64 << 20, b"x")
    server.client.lpush("e", "a list")
    client = make_client(server.url, 5.0, 1)
    names = [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert await values_of(client, names, 3) == [b"1", None, b"22", None, None, None]
    server.client.delete("b")
    assert await values_of(client, names, 3) == [b"1", None, b"22", None, None, None]
    await client.aclose()


async def test_a_lookup_is_not_hurt_by_one_long_value(server):
    names = [b"kv:%016d" % i for i in range(3)]
    index = RedisIndex(server.url, b"g" * 16)
    index._hot.connection_pool.connection_kwargs["socket_timeout"] = 5.0
    index.join(b"w" * 24, lambda: None)
    await index._heartbeat(0.0)
    slot = index._workers[b"w" * 24].slot
    for name in names:
        server.client.setbit(name, slot, 1)
    server.client.setrange(b"kv:%016d" % 2, 64 << 20, b"x")
    found = await index._ask([name[3:] + bytes(16) for name in names])
    assert found == {b"w" * 24: 2}
    for client in (index._hot, index._control):
        await client.aclose()


def test_the_parser_is_that_of_hiredis():
    """Another one has other ways to take memory."""
    from redis.asyncio.connection import DefaultParser

    assert "Hiredis" in DefaultParser.__name__


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://name:secret@h:1/0", "redis://h:1/0"),
        ("rediss://:secret@[::1]:1/0?ssl_ca_certs=/a/ca.crt", "rediss://[::1]:1/0?ssl_ca_certs=/a/ca.crt"),
        ("redis://h:1/0?username=name&password=secret&db=2", "redis://h:1/0?db=2"),
        ("unix:///run/redis.sock?db=2&password=secret", "unix:///run/redis.sock?db=2"),
        ("rediss://h:1?pass%77ord=secret&ssl_password=secret", "rediss://h:1"),
    ],
)
async def test_what_is_shown_of_a_url(url, shown):
    """And it is still one of the same Redis."""
    assert without_password(url) == shown
    told, wanted = (make_client(each, TIMEOUT_S, 1) for each in (shown, url))
    kept = {name: wanted.get_connection_kwargs().get(name) for name in ("host", "port", "path", "db", "ssl_ca_certs")}
    assert {name: told.get_connection_kwargs().get(name) for name in kept} == kept
    assert "secret" not in str(told.get_connection_kwargs())


@pytest.mark.parametrize(
    "url",
    [
        "redis://name:sec/ret@h:1/0", "redis://:12/secret@h:1/0", "redis://:12?secret@h:1/0", "redis://:12#secret@h:1/0",
        "redis://[secret@h:1/0", "secret://h:1/0", "redis://h:secret/0", "rediss://h:1/0?ssl_cert_reqs=secret",
        "redis://h:1/secret", "redis://h:1/1/2", "redis://h:1/-1", "redis://h:1/0?db=secret",
    ],
)  # fmt: skip
def test_a_malformed_url_is_not_named(url):
    with pytest.raises(ValueError, match="percent-encode") as raised:
        make_client(url, TIMEOUT_S, 1)
    assert "sec" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "rediss://h:1/0?ssl_ca_secret=x", "redis://h:1/0?ssl_ca_certs=sec", "unix:///x?secret=1", "redis://h:1/0?secret",
        "redis://h:1/0?retry=3", "redis://h:1/0?protocol=9", "redis://h:1/0?encoding=utf-16", "redis://h:1/0?socket_timeout=60",
    ],
)  # fmt: skip
def test_a_field_that_is_none_is_told_before_a_connection_is_made(url):
    with pytest.raises(ValueError, match="behind `\\?`") as raised:
        make_client(url, TIMEOUT_S, 1)
    assert "sec" not in str(raised.value)


async def test_a_connection_to_a_replica_is_not_kept(tmp_path):
    """After a failover the address leads to the new master, and the connection to the old one."""
    with RedisServer(tmp_path) as server:
        client = make_client(server.url, patience(1), 1)
        try:
            before = await client.client_id()
            assert await client.client_id() == before
            server.client.replicaof("127.0.0.1", "1")
            with pytest.raises(ReadOnlyError):
                await client.set("a", "b")
            assert await client.client_id() != before
        finally:
            await client.aclose()
