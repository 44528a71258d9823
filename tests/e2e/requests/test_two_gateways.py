"""Two gateways over the same workers and a real Redis: what one has served the other finds."""

import pytest
import redis

from tests.support.client import Client
from tests.support.redis_server import RedisServer
from tests.support.waiting import until


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def clients(run_stack, redis_server):
    """Two prefill and two decode workers, so that finding the right one is no accident."""
    shape = {"num_prefill": 2, "num_decode": 2, "num_gateways": 2}
    with run_stack("redis", gateway_options=("--redis", redis_server.url), **shape) as stack:
        clients = [Client(stack.address[gateway.name]) for gateway in stack.gateways]
        yield clients
        for client in clients:
            client.close()


def test_served_by_one_found_by_the_other(clients, prompts, redis_server):
    for first, second in (clients, clients[::-1]):
        assert any(_found(redis_server.client, first, second, prompts(640)) for _ in range(5))


def _found(connection, first: Client, second: Client, prompt_ids) -> bool:
    """Return whether the second gateway finds what the first has served; a busy Redis may answer after its budget."""
    num_names = len(connection.keys("kv:*"))
    cold = first.generate(prompt_ids, temperature=0.0, max_tokens=4)
    assert cold.usage.cached_tokens == 0
    _wait_for_names(connection, num_names + 10)
    hit = second.generate(prompt_ids, temperature=0.0, max_tokens=4)
    assert hit.outcome() == cold.outcome()
    return hit.usage.cached_tokens >= 0.9 * 640


def test_names_in_redis_are_short_and_expire(clients, prompts, redis_server):
    clients[0].generate(prompts(200), temperature=0.0, max_tokens=2)
    names = _wait_for_names(redis_server.client, 3)
    assert all(len(name) == 3 + 16 and redis_server.client.ttl(name) > 0 for name in names)


def _wait_for_names(connection: redis.Redis, num_names: int) -> list[bytes]:
    """A gateway writes a moment after its workers' report."""
    until(lambda: len(connection.keys("kv:*")) >= num_names, lambda: connection.keys("kv:*"))
    return connection.keys("kv:*")
