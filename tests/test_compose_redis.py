"""Redis as compose.yaml runs it: the gateway's index works over TLS as its own user, which may do no more."""

import asyncio
import contextlib
import re
import shutil
import subprocess

import pytest
import redis
import yaml

from baton.planning.scaling.lease import NAME, LeaderLease
from baton.service.clock import now
from gateway.discovery.redis_directory import RedisDirectory
from gateway.prefix.redis_index import RedisIndex
from gateway.queue.quota_file import Quota
from gateway.queue.quota_sync import SharedUsage
from gateway.queue.quotas import Quotas
from tests.support.gateway.redis_index import SPANS, WORKER, finds, index, snapshot
from tests.support.process import ROOT
from tests.support.redis_server import ComposeRedis, RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ComposeRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def test_the_index_works(server):
    async with index(server, b"one") as one, index(server, b"two", b"x" * 24) as two:
        await asyncio.sleep(0)
        while not one.snapshots:
            await asyncio.sleep(0.01)
        one.apply(WORKER, snapshot(*SPANS[:5]))
        await finds(one, WORKER, 5)
        await finds(two, WORKER, 5)
        assert not one.down and not two.down


async def test_quotas_are_shared(server):
    quotas = Quotas({"a": Quota(concurrent_requests=2)})
    quotas.enter("a", now())
    one, two = (SharedUsage(quotas, server.url, bytes([i]) * 16) for i in range(2))
    assert await one.exchange() == {}
    assert [told["a"].num_running for told in (await two.exchange()).values()] == [1]
    for each in (one, two):
        await each._client.aclose()


async def test_the_roster_works(server):
    directory = RedisDirectory(server.url)
    assert await directory.exchange({("decode", "10.0.0.1:5", "s"): 9.0}) == {("decode", "10.0.0.1:5", "s")}
    await directory.close()


@pytest.mark.parametrize("command", ["FLUSHALL", "CONFIG GET *", "KEYS *", "SET other 1", "EVAL return 0", "ACL LIST"])
def test_the_gateways_user_may_do_nothing_else(server, command):
    with pytest.raises(redis.exceptions.NoPermissionError):
        server.client.execute_command(*command.split())


@pytest.fixture
def nobody(server):
    client = redis.Redis("localhost", server.port, ssl=True, ssl_ca_certs=server.ca, protocol=2)
    with contextlib.closing(client):
        yield client


def test_who_has_no_password_may_ping(nobody):
    assert nobody.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        nobody.get("baton:secret")


def test_nothing_is_said_in_plain_text(server):
    with redis.Redis("localhost", server.port, socket_timeout=2) as plain, pytest.raises(redis.ConnectionError):
        plain.ping()


def test_the_health_check_of_compose(server):
    test = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]["healthcheck"]["test"][1:]
    if shutil.which(test[0]) is None:
        pytest.skip("no redis-cli here")
    argv = [test[0], "-p", str(server.port), *[word.replace("/run/secrets/ca.crt", server.ca) for word in test[1:]]]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=10).stdout.strip() == "PONG"


def test_a_stranger_that_has_the_name_is_not_believed(server, tmp_path):
    """Another authority's certificate: the gateway does not send its password there."""
    subprocess.run([ROOT / "deploy" / "make-secrets", tmp_path / "other"], check=True, capture_output=True)
    made = RedisIndex(server.url.replace(server.ca, str(tmp_path / "other" / "ca.crt")), b"three")
    with pytest.raises(redis.ConnectionError, match="certificate"):
        asyncio.run(made._control.ping())


async def test_the_scalers_user_may_do_what_its_lease_needs(tmp_path):
    """As docs/howto/scale.md has it."""
    ((commands, keys),) = re.findall(
        r"Its user needs `([^`]*)` on `([^`]*)`", (ROOT / "docs/howto/scale.md").read_text()
    )
    with RedisServer(tmp_path) as server:
        server.client.execute_command("ACL", "SETUSER", "scaler", "on", ">secret", "-@all", *commands.split(), keys)
        lease = LeaderLease(server.url.replace("//", "//scaler:secret@"), "one")
        assert await lease.hold() and await lease.hold()  # taken, and renewed
        await lease.release()
        assert not server.client.exists(NAME)
