"""A gateway between FakeWorkers that serves OpenAI's API, and OpenAI's own client for it."""

import contextlib
import json

import pytest
from openai import AsyncOpenAI

from tests.support.pace import patience


def openai_client(c, **options) -> AsyncOpenAI:
    options = {"api_key": "none", "max_retries": 0, "timeout": patience(20), **options}
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{c.gateway.http.port}/v1", **options)


@pytest.fixture
def served(cluster):
    """`async with served(**settings) as (c, client)`; `c.gateway.http.port` is the port."""

    @contextlib.asynccontextmanager
    async def start(**settings):
        async with cluster(http="127.0.0.1:0", **settings) as c, openai_client(c) as client:
            yield c, client

    return start


def decoded(head_and_body: bytes) -> tuple[int, dict[str, str], dict]:
    """Return status, headers and object of a raw answer that is not chunked."""
    head, _, body = head_and_body.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, json.loads(body) if body else {}
