"""Calls of Embed between FakeWorkers, and the vectors that these give."""

from baton.v1 import inference_pb2 as pb
from tests.support.pace import patience

IDS = [list(range(20, 20 + size)) for size in (3, 70, 200)]


def embed_request(*inputs, **fields) -> pb.EmbedRequest:
    made = [
        pb.EmbedInput(text=each) if isinstance(each, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
        for each in inputs
    ]
    return pb.EmbedRequest(inputs=made, **fields)


async def embed(c, *inputs, **fields) -> pb.EmbedResponse:
    return await c.stub.Embed(embed_request(*inputs, **fields), timeout=patience(20))


def vectors(response: pb.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in response.embeddings]


def expected(ids, pooling: int = 1) -> list[float]:
    return [len(ids), ids[0], ids[-1], pooling]
