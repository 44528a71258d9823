"""The HTTP clients of bench/http_api.py: an answer that lacks tokens is no answer."""

import asyncio
import json
from unittest.mock import Mock

import pytest

from bench.processes.gateway_client import Seen
from bench.processes.http_client import stream


def seen_of(token_ids: list[int], max_tokens: int) -> Seen:
    """Return what a client saw of an answer of these tokens to a request for `max_tokens`."""

    async def ask() -> Seen:
        event = f"data: {json.dumps({'choices': [{'token_ids': token_ids}]})}\n\n".encode()
        reader, seen = asyncio.StreamReader(), Seen()
        reader.feed_data(b"HTTP/1.1 200 OK\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
        await stream(reader, Mock(), {"max_tokens": max_tokens}, seen)
        return seen

    return asyncio.run(ask())


@pytest.mark.parametrize("max_tokens, failed", [(3, []), (4, ["3 of 4 tokens came"])])
def test_an_answer_that_lacks_tokens_has_failed(max_tokens, failed):
    seen = seen_of([7, 8, 9], max_tokens)
    assert seen.num_tokens == 3 and seen.failed == failed
