"""Connect to Redis within bounds of time and bytes. Nothing that comes from there is trusted: no value, no length, and
no announced length."""

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Sequence

import redis.asyncio as redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import DefaultParser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from gateway.store.redis_url import MALFORMED, UNKNOWN_FIELD, check_url

# redis-py may raise anything on bytes that no Redis sends, and uvloop raises RuntimeError for a connection that was
# reset.
FAILURES = Exception
MAX_REPLY_BYTES = 1 << 20  # enough for every call of a gateway: 4,096 names of workers
# The head of a list of 10,000 parts or more, which no call of a gateway gets. The parser allocates as many as are
# announced: a thousand million stop the event loop for 3 s, or for 12 s with 7.6 GB.
_LONG_LIST = re.compile(rb"[*%~>|][1-9]\d{4}")
_TAIL_BYTES = 6
MAX_BATCH = 256  # commands of one round trip: they take the event loop 3 ms, and 1,000 of them 11 ms
# Our own words for operators' pages: Redis's error messages may repeat what it was sent.
_FAULTS = (
    (AuthenticationError, "it refuses the gateway's user or password"),
    (AuthorizationError, "it refuses the gateway's user or password"),
    (NoPermissionError, "the gateway's user there lacks a right"),
    (OutOfMemoryError, "its memory is full"),
    (ReadOnlyError, "it is a read-only replica"),
    (ResponseError, "it answers with an error, which the gateway's log has"),
)


class TooMuch(InvalidResponse):
    """A reply is longer than any call of a gateway needs."""


class _Parser(DefaultParser):
    """Refuse a reply that is too long before it takes memory."""

    def __init__(self, most: int, **options):
        super().__init__(**options)
        self._most, self._left, self._tail = most, most, b""

    async def read_response(self, *args, **options):
        self._left = self._most
        response = await super().read_response(*args, **options)
        if isinstance(response, ReadOnlyError):
            raise response  # ends the connection: after a failover the address may lead to the new master
        return response

    async def read_from_socket(self) -> bool:
        buffer = await self._stream.read(self._read_size)
        if not buffer:
            raise redis.ConnectionError("Redis closed the connection")
        self._left -= len(buffer)
        if self._left < 0 or _LONG_LIST.search(self._tail + buffer):
            raise TooMuch(f"a reply of more than {self._most} bytes, or of very many parts")
        # The tail of all bytes received: those that are not parsed yet begin the next reply.
        self._tail = (self._tail + buffer)[-_TAIL_BYTES:]
        self._reader.feed(buffer)
        return True

    async def handle_push_response(self, response):
        raise InvalidResponse("a message without a subscription")


def make_client(
    url: str, timeout_s: float, max_connections: int, max_reply_bytes: int = MAX_REPLY_BYTES
) -> redis.Redis:
    """Return a client whose calls take `timeout_s` at most. Raises ValueError for a malformed URL, without the URL in
    its message."""
    check_url(url)
    try:
        # redis-py's own timeouts and retries would hold a request for half a minute.
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # enough for bit strings, and it connects in one round trip less
            parser_class=functools.partial(_Parser, max_reply_bytes),
            client_name="baton-gateway",
        )
        pool.make_connection()  # checks every field of the URL's query
    except TypeError:
        raise ValueError(UNKNOWN_FIELD) from None
    except FAILURES:  # whose message may contain a piece of the password
        raise ValueError(MALFORMED) from None
    return redis.Redis.from_pool(pool)  # closing the client closes the pool's connections


async def values_of(client: redis.Redis, names: Sequence[bytes], most: int) -> list[bytes | None]:
    """Return the value of each name; None for one that is missing, no string or longer than `most` bytes. Raises one of
    FAILURES."""
    try:
        found = await client.mget(names)
    except TooMuch:  # of long values, fetch just enough to see that they are
        async with client.pipeline(transaction=False) as batch:
            for name in names:
                batch.getrange(name, 0, most)
            found = await batch.execute(raise_on_error=False)
    if not isinstance(found, list) or len(found) != len(names):
        raise ValueError("an unexpected reply to a request for values")
    return [value if isinstance(value, bytes) and 0 < len(value) <= most else None for value in found]


async def answers_of(
    client: redis.Redis, commands: Sequence[Callable[[Pipeline], object]], timeout_s: float
) -> list[object]:
    """Return the answer to each command; all of them take a few round trips. Raises one of FAILURES, after which any of
    the commands may have been carried out."""
    answers = []
    for begin in range(0, len(commands), MAX_BATCH):
        async with client.pipeline(transaction=False) as batch:
            for command in commands[begin : begin + MAX_BATCH]:
                command(batch)
            async with asyncio.timeout(timeout_s):  # for all answers: the client's own timeout holds for each
                answers += await batch.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def is_wrong_type(error: BaseException) -> bool:
    """Return whether an error says that the value of a key is of another type than was asked for."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


async def remove_wrong_type(client: redis.Redis, name: str, error: Exception) -> None:
    """Remove the key for which a call failed with `error`, if its value is of a type that no gateway writes: it would
    stay until a person removed it."""
    if is_wrong_type(error):
        with contextlib.suppress(FAILURES):
            await client.expire(name, 0)  # a gateway has no right to DEL


def fault_of(error: Exception) -> str:
    """Return what is wrong with a Redis whose call fails with this error."""
    return next((fault for kind, fault in _FAULTS if isinstance(error, kind)), "it does not answer")
