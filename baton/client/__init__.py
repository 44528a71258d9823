"""Ask a gateway for text: blocking or asyncio, with deadlines, retries, and answers that go on where a lost one broke
off.

    from baton.client import Client

    with Client("127.0.0.1:50051") as client:
        for message in client.stream("def read_lines(path):", max_tokens=48):
            print(message.text, end="", flush=True)

Needs grpcio and protobuf only.
"""

from baton.client.aio import AsyncClient, AsyncStream
from baton.client.blocking import Client, Stream
from baton.client.errors import CallError
from baton.client.request import EmbedOptions, GenerateOptions, ScoreOptions, make_embed_request, make_request
from baton.client.retries import NO_RETRIES, RetryPolicy

__all__ = [
    "NO_RETRIES",
    "AsyncClient",
    "AsyncStream",
    "CallError",
    "Client",
    "EmbedOptions",
    "GenerateOptions",
    "RetryPolicy",
    "ScoreOptions",
    "Stream",
    "make_embed_request",
    "make_request",
]
