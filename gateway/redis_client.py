"""Connections to Redis that fail within a bound, and what failing looks like."""

import asyncio

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

# RuntimeError: what uvloop raises out of a connection that was reset while redis-py wrote to it.
FAILURES = (redis.RedisError, OSError, TimeoutError, ValueError, TypeError, RuntimeError)


def make_client(url: str, timeout_s: float, max_connections: int) -> redis.Redis:
    """Raises ValueError for a URL that is none."""
    # redis-py's own timeouts and retries would hold a request for half a minute.
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,  # bit strings need no more, and it connects in one round trip less
        client_name="baton-gateway",
    )
    return redis.Redis(connection_pool=pool)


def cancelled() -> bool:
    """Whether this task is to end: redis-py 8.1 at times returns normally from a command that was cancelled."""
    return asyncio.current_task().cancelling() > 0


def words_of(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
